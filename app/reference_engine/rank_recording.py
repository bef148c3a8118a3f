"""One recording at a time in one rank: what its orders do, step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path

from app.reference_engine import messages as m
from app.reference_engine import recording_orders as r
from app.reference_engine.errors import OrderRefused
from app.reference_engine.holding import Holding
from app.reference_engine.profiler import MOST_RECORD_BYTES, Recorder, recorder_of


class _Stage(Enum):
    PREPARING = auto()
    PREPARED = auto()
    RECORDING = auto()
    ENDED = auto()
    SAVING = auto()
    OVER = auto()


class _Recording:
    def __init__(self, recording_id: str, recorder: Recorder) -> None:
        self.id = recording_id
        self.recorder = recorder
        self.stage = _Stage.PREPARING
        self.bound: int | None = None
        self.steps = 0
        self.ended_by = r.EndedBy.STOP
        self.awaited_by: list[int] = []  # indexes of orders that wait for its end
        self.dropped = False
        self.failure = ""


class RankRecording:
    """``take`` and ``step`` are the main thread's. Threads touch a recording only in the stages
    that are named after what they do, and the main one leaves it alone then."""

    def __init__(
        self,
        holding: Holding,
        rank: int,
        tell: Callable[[m.Ack], None],
        most_record_bytes: int = MOST_RECORD_BYTES,
    ) -> None:
        """``tell`` may be called from any thread."""
        self._holding = holding
        self._rank = rank
        self._tell = tell
        self._most_record_bytes = most_record_bytes
        self._live: _Recording | None = None

    def take(self, index: int, order: r.RecordingOrder) -> None:
        """Carry it out, or begin to; it is acknowledged by ``tell``."""
        try:
            match order:
                case r.PrepareRecording():
                    self._prepare(index, order)
                case r.BeginRecording(recording_id=recording_id, steps=steps):
                    self._begin(recording_id, steps)
                    self._done(index)
                case r.AwaitRecording(recording_id):
                    self._await(index, recording_id)
                case r.FinishRecording(recording_id=recording_id, path=path):
                    self._finish(index, recording_id, Path(path))
                case r.DropRecording(recording_id):
                    self._drop(recording_id)
                    self._done(index)
        except (OrderRefused, RuntimeError, ValueError) as error:
            self._refuse(index, error)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step of the model; after it, recording ends if it has to."""
        live = self._live
        if live is None or live.stage is not _Stage.RECORDING:
            yield
            return
        with live.recorder.step(live.steps + 1):
            yield
        live.steps += 1
        if live.bound is not None and live.steps >= live.bound:
            self._end(live, r.EndedBy.STEPS)
        elif live.recorder.full:
            self._end(live, r.EndedBy.MEMORY)

    def _prepare(self, index: int, order: r.PrepareRecording) -> None:
        if self._live is not None and self._live.dropped:
            self._drop(self._live.id)  # a thread was at it when it was dropped
        if self._live is not None and self._live.stage is not _Stage.OVER:
            raise OrderRefused("another recording is not over yet")
        live = self._live = _Recording(
            order.recording_id, recorder_of(order, self._holding, self._most_record_bytes)
        )

        def prepare() -> None:
            try:
                live.recorder.prepare()
            except Exception as error:  # of a tool that is not ours
                live.stage = _Stage.OVER
                self._refuse(index, error)
                return
            live.stage = _Stage.OVER if live.dropped else _Stage.PREPARED
            self._done(index)

        threading.Thread(target=prepare, name="prepare recording", daemon=True).start()

    def _begin(self, recording_id: str, steps: int | None) -> None:
        live = self._of(recording_id, _Stage.PREPARED)
        live.bound = steps
        live.recorder.begin()
        live.stage = _Stage.RECORDING

    def _await(self, index: int, recording_id: str) -> None:
        live = self._of(recording_id, _Stage.RECORDING, _Stage.ENDED)
        if live.stage is _Stage.RECORDING:
            live.awaited_by.append(index)
        else:
            self._done(index)

    def _finish(self, index: int, recording_id: str, folder: Path) -> None:
        live = self._of(recording_id, _Stage.RECORDING, _Stage.ENDED)
        if live.stage is _Stage.RECORDING:
            self._end(live, r.EndedBy.STOP)
        self._of(recording_id, _Stage.ENDED)
        live.stage = _Stage.SAVING
        path = folder / f"rank-{self._rank}.json"

        def save() -> None:
            try:
                live.recorder.save(path)
                if live.dropped:
                    path.unlink(missing_ok=True)
                found = r.Recorded(path=str(path), steps=live.steps, ended_by=live.ended_by)
                ack = m.Ack(index=index, rank=self._rank, result=found)
            except Exception as error:  # of a tool that is not ours, or of the file system
                ack = m.Ack(index=index, rank=self._rank, error=_said(error))
            live.stage = _Stage.OVER
            self._tell(ack)

        threading.Thread(target=save, name="save recording", daemon=True).start()

    def _drop(self, recording_id: str) -> None:
        """What a thread is at goes on, and leaves nothing."""
        live = self._live
        if live is None or live.id != recording_id:
            return
        live.dropped = True
        if live.stage is _Stage.PREPARED:
            # Prepared and never begun, it would be in the way of the next one.
            live.recorder.begin()
            live.stage = _Stage.RECORDING
        if live.stage is _Stage.RECORDING:
            self._end(live, r.EndedBy.STOP)
        if live.stage is _Stage.ENDED:
            live.stage = _Stage.OVER
        if live.stage is _Stage.OVER:
            self._live = None

    def _end(self, live: _Recording, by: r.EndedBy) -> None:
        live.stage = _Stage.ENDED
        live.ended_by = by
        try:
            live.recorder.end()
        except Exception as error:  # of a tool that is not ours; the engine serves all the same
            live.stage = _Stage.OVER
            live.failure = _said(error)
        for index in live.awaited_by:
            self._done(index)
        live.awaited_by.clear()

    def _of(self, recording_id: str, *stages: _Stage) -> _Recording:
        live = self._live
        if live is None or live.id != recording_id:
            raise OrderRefused("no such recording")
        if live.stage not in stages:
            raise OrderRefused(live.failure or "the recording is not at that")
        return live

    def _done(self, index: int) -> None:
        self._tell(m.Ack(index=index, rank=self._rank, result=m.Done()))

    def _refuse(self, index: int, error: Exception) -> None:
        self._tell(m.Ack(index=index, rank=self._rank, error=_said(error)))


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
