"""Orders that record what the ranks do, and their results: one profile, on every rank.

Preparing loads what the profiler needs, in a thread while steps go on. Begin, and the bound in
steps, count by the order log: every rank records the same steps. Await is acknowledged when
recording has ended by itself, whenever that is. Finish writes the rank's records to a file, again
in a thread; drop throws them away, from wherever the recording is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RecordingKind(StrEnum):
    TORCH = "torch"  # operators of the CPU and, where there is one, of the device
    MEMORY = "memory"  # what the rank holds, over time
    DEVICE = "device"  # the device alone


class EndedBy(StrEnum):
    """What made a recording end."""

    STOP = "stop"
    STEPS = "steps"
    MEMORY = "memory"  # the records took as much memory as they may


# ---- orders ----


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRecording:
    recording_id: str
    kind: RecordingKind
    record_shapes: bool = False
    with_stack: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRecording:
    """``steps`` None: until it is finished."""

    recording_id: str
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class AwaitRecording:
    recording_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRecording:
    """``path``: of a folder; the rank's file is to be ``rank-N.json`` in it."""

    recording_id: str
    path: str


@dataclass(frozen=True, slots=True)
class DropRecording:
    """Also of a recording that the rank does not know."""

    recording_id: str


RecordingOrder = (
    PrepareRecording | BeginRecording | AwaitRecording | FinishRecording | DropRecording
)


# ---- results ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """``path`` of the file, a trace that nobody has checked yet. ``steps`` as far as recorded."""

    path: str
    steps: int
    ended_by: EndedBy
