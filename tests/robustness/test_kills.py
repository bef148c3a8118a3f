"""One rank killed or stopped, at each phase of each order.

An order is never told as applied unless every rank has committed it; its end comes soon and names
the rank; what is served afterwards is one version or nothing, and a full update brings it back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.reference_engine.calling import Call
from tests.robustness.lines import LINES, Line
from tests.robustness.stage import OPEN, VALID, Stage, stage

pytestmark = pytest.mark.anyio

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
RANK_TIMEOUT_S = 3.0
LONG_TIMEOUT_S = 60.0
# Promised: so soon after a death, and so soon after a rank that says nothing counts as lost. The
# figure is in the report; here it has room for a machine that does other things besides.
END_S = 5.0
ROOM = 4.0
POINTS = tuple(
    (phase, point)
    for phase in ("prepare", "commit", "conclude")
    for point in ("received", "applied", "acknowledged")
)


@dataclass(frozen=True, slots=True)
class Case:
    """``phase`` None: before the order is given."""

    line: Line
    phase: str | None
    point: str
    rank: int
    number: signal.Signals

    def __str__(self) -> str:
        at = f"{self.phase}-{self.point}" if self.phase else self.point
        return f"{self.line.name}-{at}-{self.number.name}-rank{self.rank}"

    @property
    def entry(self) -> str:
        assert self.phase is not None
        return f"{self.line.entry(self.phase)}.{self.point}"

    @property
    def acknowledged_all(self) -> bool:
        """Whether the rank has done all it has to do for the order."""
        last = "commit" if self.line.conclude is None else "conclude"
        return (self.phase, self.point) == (last, "acknowledged")


def cases(ranks: tuple[int, ...]) -> Iterator[Case]:
    for line in LINES:
        for number in (KILL, STOP):
            for rank in ranks:
                yield Case(line, None, "before", rank, number)
                for phase, point in POINTS:
                    # Stopped before it did something or before it said so looks alike.
                    once = number is KILL or point != "applied"
                    if once and line.entry(phase) is not None:
                        yield Case(line, phase, point, rank, number)


def played(case: Case, ranks: int) -> Any:
    """A parameter set: what kills a rank on an engine with all the time in the world, so that a
    busy machine loses no other rank; what stops one on an engine with little."""
    timeout_s = RANK_TIMEOUT_S if case.number is STOP else LONG_TIMEOUT_S
    return pytest.param((ranks, timeout_s), case, id=f"{ranks}-{case}")


@pytest.fixture(scope="module")
async def made(
    request: pytest.FixtureRequest,
    versions: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Stage]:
    ranks, timeout_s = request.param
    folder = tmp_path_factory.mktemp(f"{ranks}-ranks")
    async with stage(folder, versions, ranks=ranks, rank_timeout_s=timeout_s) as ready:
        yield ready


@pytest.fixture
async def broken(made: Stage) -> Stage:
    """An engine that serves; a test that failed leaves the next one another."""
    if not made.sound:
        await made.start_again()
    return made


async def check(stage: Stage, case: Case) -> float:
    """Play one case; from the fault to the order's end, in seconds."""
    stage.sound = False
    old = await stage.version()
    asked = await stage.ask().after(1)
    if case.line.before is not None:
        await case.line.before(stage)
    passed = {rank: len(stage.faults.passed(rank)) for rank in stage.ranks}
    began = time.monotonic()
    pid = stage.faults.pid(case.rank)
    if case.phase is None:
        os.kill(pid, case.number)
    else:
        stage.faults.arm(case.rank, case.entry, case.number)
    end = await case.line.give(stage)
    ended = time.monotonic()
    assert not stage.faults.armed(case.rank), "the rank never came to that point"
    done = {rank: stage.faults.passed(rank)[passed[rank] :] for rank in stage.ranks}
    if end.applied:
        assert all(f"{case.line.commit}.applied" in done[rank] for rank in stage.ranks)
        assert case.acknowledged_all or case.phase is None
    elif end.accepted:
        # Also where the rank had said all it had to say: another's word may still be on its way.
        assert case.rank in end.ranks
        assert f"rank {case.rank}" in end.message
    else:
        assert case.phase is None
    await _serves_one_version(stage, asked, old, applied=end.applied)
    new = await stage.other_version()
    await stage.bring_back(new, pid)
    await stage.leave_as_found()
    assert await stage.serves(new)
    stage.sound = True
    return ended - (began if case.phase is None else stage.faults.broke_at(case.rank))


async def _serves_one_version(stage: Stage, asked: Call, old: str, *, applied: bool) -> None:
    """What was in flight was of the version before, and what is asked now is of one."""
    state = (await stage.clients.profile()).state
    if not applied:
        assert state.weights.version == old
    if state.admission == OPEN:
        heard = await stage.ask().whole()
        version = state.weights.version
        assert heard.ids == stage.expected(version)[: len(heard.ids)]
        if heard.finished is not None:
            # It may have waited until the ranks were back.
            assert (await stage.clients.profile()).state.weights.state == VALID
        whole = await asked.whole()
        if not applied:
            assert whole.ids == stage.expected(old)[: len(whole.ids)]


# Four ranks take long to start: what is different with more than two is who waits for whom.
ON_FOUR = {"pause-drain", "release-preserve", "update-disk"}
QUICK = {
    "flush-commit-applied-SIGKILL-rank1",
    "pause-drain-prepare-received-SIGKILL-rank1",
    "pause-keep-commit-received-SIGKILL-rank0",
    "resume-commit-applied-SIGKILL-rank1",
    "release-preserve-commit-acknowledged-SIGKILL-rank1",
    "restore-conclude-received-SIGKILL-rank1",
    "update-disk-before-SIGKILL-rank1",
    "update-disk-commit-applied-SIGKILL-rank1",
    "update-disk-conclude-applied-SIGKILL-rank0",
    "lora-load-commit-applied-SIGKILL-rank1",
    "update-memory-prepare-acknowledged-SIGKILL-rank0",
    "update-disk-commit-received-SIGSTOP-rank1",
}


@pytest.mark.parametrize(
    ("made", "case"),
    [played(one, 2) for one in cases((0, 1)) if str(one) in QUICK],
    indirect=["made"],
)
async def test_a_rank_broken_within_an_order(broken: Stage, case: Case) -> None:
    await check(broken, case)


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "case"),
    [
        *(played(one, 2) for one in cases((0, 1))),
        *(played(one, 4) for one in cases((0, 3)) if one.line.name in ON_FOUR),
    ],
    indirect=["made"],
)
async def test_every_point_of_every_order(
    broken: Stage, case: Case, record_testsuite_property: Callable[[str, object], None]
) -> None:
    took = await check(broken, case)
    record_testsuite_property(f"{len(broken.ranks)}-{case} ended after", f"{took:.2f} s")
    assert took < ROOM * END_S + (RANK_TIMEOUT_S if case.number is STOP else 0.0)
