"""The processes of ranks: where those of all tests come from, and which of them there are."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path

from app.reference_engine.nursery import RANK_NAME, Nursery
from app.reference_engine.processes import WORKER


@functools.cache
def nursery(worker: str = WORKER) -> Nursery:
    """One for all engines of this process, so that torch is loaded once and not for each rank."""
    made = Nursery(worker)
    atexit.register(made.close)
    return made


def ranks(front_end: int | None = None) -> list[int]:
    """Those of that process, or of this one; oldest first."""
    return [pid for pid in children(front_end) if _name(pid) == RANK_NAME]


def children(parent: int | None = None) -> list[int]:
    """Of that process, or of this one, whichever thread started them, as far as they run; oldest
    first."""
    tasks = Path("/proc", "self" if parent is None else str(parent), "task")
    found = [path.read_text() for path in tasks.glob("*/children")]
    return sorted(int(pid) for text in found for pid in text.split() if alive(int(pid)))


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
