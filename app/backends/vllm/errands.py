"""One order on its way through the engine: written down before each call, and after it.

What is written down fences too: a gateway that stood still while another one took the engine over
finds at its next step that its row is gone, and makes no further call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from datetime import datetime

from app.backends.port import EngineRefused, EngineSilent, NotSent, Order, OutcomeLost
from app.backends.streams import no_way
from app.backends.vllm.aims import Aim, PauseAim, ResumeAim, aim_of, unchanged
from app.backends.vllm.judging import finds_it_done, judge, remarks
from app.backends.vllm.kept import End, Kept, UnderWay
from app.backends.vllm.members import Calls, Crew, EngineDead
from app.backends.vllm.notes import Notes, Overtaken
from app.backends.vllm.observing import PAUSING, WITHDRAWING, observe
from app.backends.vllm.readings import EngineReading
from app.backends.vllm.refusals import dead, refused, restarted
from app.backends.vllm.statuses import Done, Lost, Refused, Said
from app.backends.vllm.verdicts import (
    NoEffect,
    Undecided,
    Verdict,
    ended,
    first_error,
    restarts,
    verdict,
)
from app.domain.kinds import FailureEffect, PauseMode
from app.domain.operation import OperationError
from app.domain.ranks import RankReport, RankState
from app.domain.transitions import Completed, Fact, Failed, RankReported, Warned

log = logging.getLogger(__name__)

READ_S = 3.0
_TRANSIT_S = 2.0
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Means:
    """What an order is carried out with. `settle_s`: what a call may take beyond the deadline."""

    crew: Crew
    notes: Notes
    now: Callable[[], datetime]
    settle_s: float


class Errand:
    """`kept`: the row as this errand has written it last. `reading`: the latest."""

    def __init__(self, order: Order, means: Means) -> None:
        self.order = order
        self.crew = means.crew
        self.now = means.now
        self._notes = means.notes
        self.settle_s = means.settle_s
        self.kept = Kept()
        self.reading = EngineReading(())

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return (self.order.deadline_at - self.now()).total_seconds()

    @property
    def longest_s(self) -> float:
        """For a call that may take as long as the order may, and at least a moment."""
        return max(self.left_s, self.settle_s)

    # ---- setting out ----

    async def look(self) -> bool:
        """Read the engine and bring the row up to date. Whether this order is under way in it.
        Raises EngineRefused: nothing was sent by this attempt."""
        for _ in range(_TRIES):
            kept = await self._notes.read()
            way = kept.under_way
            own = way is not None and way.operation_id == self.order.operation_id
            if own:
                self.kept = kept
            try:
                self.reading = await self.crew.read(READ_S)
            except EngineDead as gone:
                if own:
                    return True
                message = "the engine behind the front end does not answer any more"
                raise refused("UNAVAILABLE", "ENGINE_DEAD", message, retryable=True) from gone
            except EngineSilent as silent:
                raise EngineRefused(no_way(silent)) from silent
            if own:
                return True
            if way is not None and not kept.abandoned:
                message = "another order is under way at the engine"
                raise refused("ABORTED", "ENGINE_BUSY", message, retryable=True)
            after = observe(kept, self.reading, self.now())
            try:
                self.kept = kept if after == kept else await self._notes.write(after)
            except Overtaken:
                continue
            return False
        raise refused("ABORTED", "ENGINE_BUSY", "the engine changes all the time", retryable=True)

    def judge(self) -> None:
        """Raises EngineRefused."""
        before = replace(self.kept, under_way=None)
        judge(self.order, before, self.reading, self.now())

    async def begin(self, step: str) -> None:
        """Written down before the first call."""
        command = self.order.command
        way = UnderWay(
            operation_id=self.order.operation_id,
            kind=command.kind,
            step=step,
            request=command.document(),
        )
        await self.write(replace(self.kept, under_way=way))

    async def first_calls(self) -> Calls:
        """For the first call of the order. What fails here takes the entry back, since nothing was
        sent. Raises EngineRefused, NotSent, OutcomeLost."""
        try:
            return await self.crew.make_ready(self.order, self.now)
        except (EngineRefused, NotSent, OutcomeLost):
            await self.write(self.kept.over(None))
            raise

    async def calls(self) -> Calls:
        """For a later call: of when the first had to be sent nothing hangs any more. Raises
        OutcomeLost."""
        try:
            return await self.crew.make_ready(replace(self.order, send_by=None), self.now)
        except EngineRefused as unreachable:
            raise OutcomeLost("the engine can't be reached any more") from unreachable

    # ---- on the way ----

    async def write(self, kept: Kept) -> None:
        """Raises OutcomeLost: another gateway goes on with it."""
        try:
            self.kept = await self._notes.write(kept)
        except Overtaken as overtaken:
            raise OutcomeLost("another gateway has taken the engine over") from overtaken

    async def step(self, step: str) -> None:
        await self.write(self.kept.at(step))

    async def read(self) -> EngineReading:
        """Raises OutcomeLost, EngineDead."""
        try:
            self.reading = await self.crew.read(READ_S)
        except EngineDead:
            raise
        except EngineSilent as silent:
            raise OutcomeLost("the engine does not say how it was left") from silent
        return self.reading

    async def end(self, found: Verdict) -> AsyncGenerator[Fact, None]:
        """Written down, then told."""
        await self.write(found.kept)
        for report in reports_of(found.end, self.reading):
            yield RankReported(report=report)
        yield found.end

    async def give_up(self, refusal: EngineRefused) -> None:
        """Every member has refused: it is as if it had never been sent. Raises it."""
        await self.write(self.kept.over(None))
        raise refusal


def reports_of(end: End, reading: EngineReading) -> list[RankReport]:
    if isinstance(end, Completed):
        every = reading.ranks(set(range(len(reading.members))))
        return [RankReport(rank, RankState.COMMITTED) for rank in every]
    if isinstance(end, Failed):
        state = RankState.FAILED
        if end.error.effect is FailureEffect.UNKNOWN:
            state = RankState.UNKNOWN
        return [RankReport(rank, state, end.error.message) for rank in end.error.ranks]
    return []


# ---- orders of one call ----


async def one_call(errand: Errand) -> AsyncGenerator[Fact, None]:
    """As `EngineBackend.carry_out` promises, for an order that has an aim."""
    errand.judge()
    before = replace(errand.kept, under_way=None)
    aim = _aim(errand, before)
    if finds_it_done(aim, before, errand.reading):
        if errand.kept.under_way is not None:
            await errand.write(errand.kept.over(None))
        yield Completed(result=unchanged(aim, before), revision=errand.kept.revision)
        return
    for remark in remarks(errand.order.command, errand.reading):
        yield Warned(warning=remark)
    await errand.begin(aim.step)
    calls = await errand.first_calls()
    answers = await calls.order(aim.rpc, aim.request(), errand.longest_s)
    if all(isinstance(one, Refused) for one in answers.values()):
        await errand.give_up(EngineRefused(first_error(answers)))
    if _drain_over(errand, aim, answers) and (withdrawn := await _withdraw(errand)) is not None:
        async for fact in errand.end(withdrawn):
            yield fact
        return
    async for fact in conclude(errand, answers):
        yield fact


async def conclude(
    errand: Errand, answers: dict[int, Said] | None = None
) -> AsyncGenerator[Fact, None]:
    """By what is read now. Raises OutcomeLost."""
    before = replace(errand.kept, under_way=None)
    try:
        await errand.read()
        if answers is not None and _differ_for_want_of_an_answer(errand, before, answers):
            # What has no answer may be on its way still.
            await asyncio.sleep(min(errand.settle_s, _TRANSIT_S))
            await errand.read()
    except EngineDead:
        async for fact in errand.end(ended(errand.kept, Failed(error=dead()))):
            yield fact
        return
    try:
        found = verdict(_aim(errand, before), errand.kept, errand.reading, errand.now(), answers)
    except (NoEffect, Undecided) as open_still:
        why = "the engine's reply was lost"
        if answers is not None:
            why = next(one.why for one in answers.values() if isinstance(one, Lost))
        raise OutcomeLost(why) from open_still
    async for fact in errand.end(found):
        yield fact


def _differ_for_want_of_an_answer(errand: Errand, before: Kept, answers: dict[int, Said]) -> bool:
    aim = _aim(errand, before)
    shown = {aim.shown(member) for member in errand.reading.members}
    return len(shown) > 1 and any(isinstance(one, Lost) for one in answers.values())


def _aim(errand: Errand, before: Kept) -> Aim:
    aim = aim_of(errand.order.command, before, errand.reading)
    assert aim is not None
    return aim


def _drain_over(errand: Errand, aim: Aim, answers: dict[int, Said]) -> bool:
    """Whether it is a drain of an open engine whose deadline is over."""
    drain = isinstance(aim, PauseAim) and aim.command.mode is PauseMode.DRAIN
    late = any(isinstance(one, Lost) and one.late for one in answers.values())
    return drain and late and errand.left_s <= 0 and errand.kept.pause is None


async def _withdraw(errand: Errand) -> Verdict | None:
    """Open admission again. The pause that did not end in time holds no lock any more: with its
    call its wait was given up, though the engine stays closed. None: it could not be opened."""
    await errand.step(WITHDRAWING)
    calls = await errand.calls()
    answers = await calls.order("ResumeGeneration", ResumeAim().request(), READ_S)
    if not all(isinstance(one, Done) for one in answers.values()):
        await errand.step(PAUSING)
        return None
    try:
        reading = await errand.read()
    except EngineDead:
        return ended(errand.kept, Failed(error=dead()))
    anew = restarts(errand.kept, reading)
    if anew:
        return ended(errand.kept, Failed(error=restarted(reading.ranks(anew))))
    if reading.paused is not False:
        await errand.step(PAUSING)
        return None
    message = "requests were still at work at the deadline; admission is open again"
    error = OperationError(
        "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", message, effect=FailureEffect.ROLLED_BACK
    )
    return ended(errand.kept, Failed(error=error))
