"""What is kept of finished profiles: so many, and so many bytes; the oldest go first.

A folder counts as a profile if it has nothing in it but files of ranks: whatever else somebody has
put below the root is nobody's business here, and stays.
"""

from __future__ import annotations

import logging
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_FILE = re.compile(r"rank-[0-9]+\.json\.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLimits:
    """Of all finished profiles below one root, the latest of which is kept whatever its size."""

    count: int = 64
    size_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        if self.count < 1 or self.size_bytes < 1:
            raise ValueError("one profile at least is kept")


@dataclass(frozen=True, slots=True)
class _Kept:
    finished_ns: int
    folder: Path
    size_bytes: int


def clear(root: Path, limits: ProfileLimits) -> list[str]:
    """Remove what is over the limits; the names of the folders. Blocks on the file system. What can
    not be looked at, or not be removed, stays."""
    removed = []
    taken = 0
    kept = sorted(_profiles(root), key=lambda one: (one.finished_ns, one.folder), reverse=True)
    for number, one in enumerate(kept):
        taken += one.size_bytes
        if number and (number >= limits.count or taken > limits.size_bytes):
            # A download that has begun goes on: it reads what it has opened.
            shutil.rmtree(one.folder, ignore_errors=True)
            removed.append(one.folder.name)
    if removed:
        log.info("profiles were removed to make room: %s", ", ".join(removed))
    return removed


def _profiles(root: Path) -> list[_Kept]:
    found: list[_Kept] = []
    try:
        folders = list(root.iterdir())
    except OSError:
        return found
    for folder in folders:
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode):
                continue
            files = list(folder.iterdir())
            if not files or any(_FILE.fullmatch(file.name) is None for file in files):
                continue
            size = sum(file.lstat().st_size for file in files)
        except OSError:
            continue
        found.append(_Kept(status.st_mtime_ns, folder, size))
    return found
