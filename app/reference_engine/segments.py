"""The engine's own segments of shared memory: whose they are, and which are nobody's any more.

A segment outlives the process that made it, and can be as large as a model. The engine therefore
keeps a lock on each of its own for as long as it needs it: the system drops the lock with the
process, however that ends, and the next engine of the same user removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

SHARED = Path("/dev/shm")  # noqa: S108 (where the system has its shared memory)
_OWN = "own-"
_NAME = re.compile(r"[0-9a-f]{32}")
# Between the lock of its making and that of its holder a segment looks like nobody's for a moment.
_YOUNG_S = 5.0


@contextlib.contextmanager
def new_segment(prefix: str) -> Iterator[BinaryIO]:
    """Under a name that nobody has had, locked; removed again if the block raises. ``prefix`` is
    that of all segments of the engine."""
    path = str(SHARED / f"{prefix}{_OWN}{uuid4().hex}")
    mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(path, "wb", opener=lambda name, _: os.open(name, mode, 0o600)) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield file
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise


def hold(path: str) -> int:
    """A descriptor that holds the segment until it is closed. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def sweep(prefix: str, now_s: float) -> list[str]:
    """Remove own segments of engines that are gone; their paths. ``now_s``: the system's clock.
    What can not be looked at stays."""
    removed = []
    for path in SHARED.glob(f"{prefix}{_OWN}*"):
        if _NAME.fullmatch(path.name.removeprefix(f"{prefix}{_OWN}")) is None:
            continue
        try:
            if _removed(str(path), now_s):
                removed.append(str(path))
        except OSError:
            continue
    return removed


def _removed(path: str, now_s: float) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        young = now_s - status.st_ctime < _YOUNG_S
        if young or not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody holds it
        os.unlink(path)
        return True
    finally:
        os.close(fd)
