"""One rank's recording, order by order: what it acknowledges, refuses, and drops."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest

from app.reference_engine import messages as m
from app.reference_engine import recording_orders as r
from app.reference_engine.assembly import BuiltRank, build_rank
from app.reference_engine.limits import CoreSettings
from app.reference_engine.rank_recording import RankRecording

NAME = "p-1"
PREPARE = r.PrepareRecording(recording_id=NAME, kind=r.RecordingKind.TORCH)
BEGIN = r.BeginRecording(recording_id=NAME)


class Rank:
    """A rank without its process: orders in, acknowledgements out."""

    def __init__(self, built: BuiltRank, most_record_bytes: int = 1 << 30) -> None:
        self._holding = built.holding
        self._acks: queue.Queue[m.Ack] = queue.Queue()
        self._recording = RankRecording(self._holding, 0, self._acks.put, most_record_bytes)
        self._holding.around_step = self._recording.step
        self._index = 0

    def order(self, order: r.RecordingOrder) -> int:
        self._index += 1
        self._recording.take(self._index, order)
        return self._index

    def ack(self) -> m.Ack:
        return self._acks.get(timeout=60)

    def done(self, order: r.RecordingOrder) -> m.Result | None:
        index = self.order(order)
        ack = self.ack()
        assert (ack.index, ack.error) == (index, None)
        return ack.result

    def refused(self, order: r.RecordingOrder) -> str:
        index = self.order(order)
        ack = self.ack()
        assert ack.index == index
        assert ack.error
        return ack.error

    def step(self) -> None:
        self._holding.compute(self._holding.probe_plan)

    @property
    def quiet(self) -> bool:
        return self._acks.empty()


@pytest.fixture(scope="module")
def built(tiny: Path) -> BuiltRank:
    return build_rank(tiny, CoreSettings(torch_threads=1, device="cpu"))


def finish(folder: Path) -> r.FinishRecording:
    return r.FinishRecording(recording_id=NAME, path=str(folder))


def test_its_steps_bound_it_and_who_waits_is_told(built: BuiltRank, tmp_path: Path) -> None:
    rank = Rank(built)
    rank.step()
    rank.done(PREPARE)
    rank.step()  # not recorded: it has not begun
    rank.done(r.BeginRecording(recording_id=NAME, steps=2))
    awaiting = rank.order(r.AwaitRecording(NAME))
    rank.step()
    assert rank.quiet
    rank.step()
    assert rank.ack() == m.Ack(index=awaiting, rank=0, result=m.Done())
    rank.step()  # nor is this one
    rank.done(r.AwaitRecording(NAME))
    recorded = rank.done(finish(tmp_path))
    path = tmp_path / "rank-0.json"
    assert recorded == r.Recorded(path=str(path), steps=2, ended_by=r.EndedBy.STEPS)
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert {"engine step 1", "engine step 2"} <= set(names)
    assert "engine step 3" not in names
    assert rank.refused(finish(tmp_path)) == "the recording is not at that"


def test_records_that_take_too_much_memory_end_it(built: BuiltRank, tmp_path: Path) -> None:
    rank = Rank(built, most_record_bytes=1 << 20)
    rank.done(PREPARE)
    rank.done(BEGIN)
    awaiting = rank.order(r.AwaitRecording(NAME))
    steps = 0
    while rank.quiet:
        rank.step()
        steps += 1
    assert rank.ack() == m.Ack(index=awaiting, rank=0, result=m.Done())
    recorded = rank.done(finish(tmp_path))
    assert isinstance(recorded, r.Recorded)
    assert (recorded.steps, recorded.ended_by) == (steps, r.EndedBy.MEMORY)


@pytest.mark.parametrize("orders", [(PREPARE,), (PREPARE, BEGIN)])
def test_what_is_dropped_is_in_nobodys_way(
    built: BuiltRank, tmp_path: Path, orders: tuple[r.RecordingOrder, ...]
) -> None:
    rank = Rank(built)
    for order in orders:
        rank.done(order)
    rank.step()
    rank.done(r.DropRecording(NAME))
    rank.done(r.DropRecording(NAME))
    assert rank.refused(finish(tmp_path)) == "no such recording"
    rank.done(PREPARE)
    rank.done(BEGIN)
    rank.step()
    rank.done(finish(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


def test_there_is_one_at_a_time(built: BuiltRank, tmp_path: Path) -> None:
    rank = Rank(built)
    other = r.PrepareRecording(recording_id="p-2", kind=r.RecordingKind.MEMORY)
    rank.done(PREPARE)
    assert rank.refused(other) == "another recording is not over yet"
    assert rank.refused(r.BeginRecording(recording_id="p-2")) == "no such recording"
    rank.done(BEGIN)
    assert rank.refused(BEGIN) == "the recording is not at that"
    rank.done(finish(tmp_path))
    rank.done(other)
    rank.done(r.DropRecording("p-2"))


def test_a_file_that_cannot_be_written_is_no_fault_of_the_rank(
    built: BuiltRank, tmp_path: Path
) -> None:
    rank = Rank(built)
    rank.done(r.PrepareRecording(recording_id=NAME, kind=r.RecordingKind.MEMORY))
    rank.done(BEGIN)
    assert "No such file" in rank.refused(finish(tmp_path / "none"))
    rank.step()
    device = r.PrepareRecording(recording_id="p-2", kind=r.RecordingKind.DEVICE)
    assert rank.refused(device) == "there is no device to record"
    rank.done(PREPARE)
    rank.done(r.DropRecording(NAME))
