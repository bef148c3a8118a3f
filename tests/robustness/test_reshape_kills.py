"""One rank killed or stopped while the engine takes another shape: an old one, or a new one.

Whatever happens, it ends in the old shape or in the new one, whole, with the weights it had.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.reference_engine.calling import Told
from tests.reference_engine.ranks import alive
from tests.reference_engine.serving import PATIENCE_S, eventually
from tests.robustness.stage import VALID, Stage, stage

pytestmark = pytest.mark.anyio

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
RANK_TIMEOUT_S = 3.0
# 5 s are promised after a death, and after a rank that says nothing counts as lost; here is room
# for a machine that does other things besides.
END_S = 20.0
OLD_SIZE, NEW_SIZE = 1, 2


@dataclass(frozen=True, slots=True)
class Case:
    """``entry`` of the order log, which only the old or only the new ranks come to: the engine is
    paused beforehand, and a new group takes its gate over."""

    entry: str
    point: str
    rank: int
    number: signal.Signals

    def __str__(self) -> str:
        whose = "old" if self.old else "new"
        return f"{whose}-{self.entry}-{self.point}-{self.number.name}-rank{self.rank}"

    @property
    def old(self) -> bool:
        return self.entry == "WriteWeights"

    @property
    def last(self) -> bool:
        """Whether the rank has done all it has to do for the order."""
        return (self.entry, self.point) == ("Probe", "acknowledged")


CASES = [
    Case(entry, point, rank, number)
    for entry, ranks in (
        ("WriteWeights", range(OLD_SIZE)),
        ("SetGate", range(NEW_SIZE)),
        ("Probe", range(NEW_SIZE)),
    )
    for point in ("received", "applied", "acknowledged")
    for rank in ranks
    for number in (KILL, STOP)
    # Stopped before it did something or before it said so looks alike.
    if number is KILL or point != "applied"
]
QUICK = {
    "old-WriteWeights-received-SIGKILL-rank0",
    "new-SetGate-received-SIGKILL-rank1",
    "new-Probe-received-SIGSTOP-rank1",
}


@pytest.fixture(scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("one")
    versions: dict[str, Path] = {"v0": ensure_tiny_checkpoint(folder, 0)}
    async with stage(folder, versions, ranks=OLD_SIZE, rank_timeout_s=RANK_TIMEOUT_S) as made:
        yield made


def reshape(stage: Stage, size: int) -> Told:
    request = pb.ReconfigureServingRequest(
        idempotency_key=uuid4().hex, tensor_parallel_size=size, drain=pb.DRAIN_RULE_WAIT
    )
    return Told(stage.clients.admin.ReconfigureServing(request, timeout=PATIENCE_S))


async def check(stage: Stage, case: Case) -> float:
    """Play one case; how long the order took to its end, in seconds."""
    before = (await stage.clients.profile()).state.weights
    await stage.clients.pause(pb.PAUSE_MODE_KEEP).completed()
    stage.faults.arm(case.rank, f"{case.entry}.{case.point}", case.number)
    told = reshape(stage, NEW_SIZE)
    await told.until("accepted")

    async def reached() -> bool:
        return not stage.faults.armed(case.rank)

    await eventually(reached)
    began, broken = time.monotonic(), stage.faults.pid(case.rank)
    end = await told.end()
    took = time.monotonic() - began
    kind = end.WhichOneof("event")
    if kind == "completed":
        # An old rank that has written its weights has nothing more to do, so that nobody need
        # notice before the new ones serve.
        assert case.last or (case.old and case.point == "acknowledged")
    else:
        assert kind == "failed"
        assert f"rank {case.rank}" in end.failed.message
        # One that breaks behind its last answer had started.
        lost = case.old or (case.last and end.failed.reason == "RANK_LOST")
        assert end.failed.reason == ("RANK_LOST" if lost else "RANKS_NOT_STARTED")

    async def whole() -> bool:
        # What is told may be from before its end is noticed. A rank of the new shape that breaks
        # before the order is done is not replaced: the old ranks go on.
        waits = kind == "completed" and stage.faults.pid(case.rank) == broken
        if alive(broken) or waits:
            return False
        state = (await stage.clients.profile()).state
        return not state.ranks and state.weights.state == VALID

    await eventually(whole)
    profile = await stage.clients.profile()
    assert profile.world_size == (NEW_SIZE if kind == "completed" else OLD_SIZE)
    assert profile.state.weights == before
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    await stage.leave_as_found()
    assert await stage.serves("v0")
    if kind == "completed":
        await reshape(stage, OLD_SIZE).completed()
    return took


@pytest.mark.parametrize("case", [one for one in CASES if str(one) in QUICK], ids=str)
async def test_a_rank_broken_while_the_shape_changes(one: Stage, case: Case) -> None:
    await check(one, case)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_every_point_of_a_change_of_shape(one: Stage, case: Case) -> None:
    took = await check(one, case)
    assert took < END_S + (RANK_TIMEOUT_S if case.number is STOP else 0.0)
