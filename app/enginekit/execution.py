"""One order, from its acceptance to its end, detached from whoever asked for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from app.domain.commands import Command
from app.domain.kinds import AbortOutcome, FailureEffect, Verification
from app.domain.operation import OperationError, OperationWarning
from app.domain.ranks import RankReport, RankState
from app.domain.transitions import Cancelled, Completed, Fact, Failed, RankReported, Warned
from app.enginekit.carrying_out import CARRYING_OUT
from app.enginekit.errands import Ending, Errand
from app.enginekit.journal import LiveOperation
from app.enginekit.phases import (
    BeforePrepare,
    CancelAsked,
    DeadlinePassed,
    Interrupts,
    OrderFailed,
    Report,
    Timings,
    TwoPhase,
    deadline_error,
    fault_error,
    unexpected,
)
from app.enginekit.progress import ProgressWriter
from app.enginekit.records import NO_CHANGE, REVISION, Change, Counters
from app.enginekit.refusals import StoreUnavailable
from app.enginekit.runtime import Conclusion, Observation, Order, Runtime, RuntimeFault
from app.enginekit.sessions import OpenSession
from app.enginekit.state import EngineState

log = logging.getLogger(__name__)

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    timings: Timings
    progress_interval_s: float
    default_lease_ms: int


@dataclass(frozen=True, slots=True)
class _Unsuccessful:
    """`error` None: cancelled. `lost`: ranks that were not rolled back."""

    error: OperationError | None
    lost: tuple[int, ...] = ()

    def fact(self, revision: int) -> Fact:
        if self.error is None:
            return Cancelled(message="cancelled, and undone", revision=revision)
        return Failed(error=self.error, revision=revision)


class Execution:
    """Exactly one terminal event, whatever the runtime does."""

    def __init__(
        self,
        runtime: Runtime,
        state: EngineState,
        live: LiveOperation,
        command: Command,
        interrupts: Interrupts,
        settings: ExecutionSettings,
        default_hold_limit_ms: int,
        session: OpenSession | None = None,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._journal = state.journal
        self._live = live
        self._interrupts = interrupts
        self._timings = settings.timings
        self._progress = ProgressWriter(self._journal, live, settings.progress_interval_s)
        self._warnings: tuple[OperationWarning, ...] = ()
        self._errand = Errand(
            operation=live.operation,
            command=command,
            runtime=runtime,
            session=session,
            state=state,
            interrupts=interrupts,
            started_at=state.now(),
            default_hold_limit_ms=default_hold_limit_ms,
            ranks=lambda: runtime.ranks,
            describe=runtime.describe,
            over_ranks=self._over_ranks,
            end_requests=self._end_requests,
            record=self._record,
            report=self._progress.note,
        )

    async def run(self) -> None:
        self._state.order_began()
        try:
            await self._carry_out()
        except Exception:
            # The store holds something else than this process wrote: the operation stays open
            # and keeps the engine from further orders, but requests must not wait for it.
            log.exception("an order could not be ended")
            self._put_back()
        finally:
            self._state.order_over()
            self._progress.close()

    async def _carry_out(self) -> None:
        try:
            ending = await CARRYING_OUT[self._errand.command.kind](self._errand)
        except CancelAsked:
            end = _Unsuccessful(None)
        except DeadlinePassed:
            end = _Unsuccessful(deadline_error((), FailureEffect.NONE))
        except OrderFailed as failed:
            end = _Unsuccessful(failed.error, failed.not_rolled_back)
        except Exception:
            log.exception("an order failed for a reason of the kit's own")
            fault = unexpected()
            end = _Unsuccessful(OperationError("INTERNAL", fault.reason, fault.message))
        else:
            await self._succeed(ending)
            return
        await self._end(end)

    async def _over_ranks(
        self,
        command: Command | None = None,
        *,
        part: str = "",
        before_commit: Callable[[], Awaitable[None]] | None = None,
        before_prepare: BeforePrepare | None = None,
        rescue: bool = False,
    ) -> Conclusion:
        operation_id = self._live.operation.id
        interrupts = self._interrupts
        report: Report = self._report_faults if part else self._report
        if rescue:
            deadline_at = asyncio.get_running_loop().time() + self._timings.rollback_timeout_s
            interrupts, report = Interrupts(deadline_at, self._timings), _say_nothing
        order = Order(
            operation_id=f"{operation_id}.{part}" if part else operation_id,
            command=command or self._errand.command,
            report=self._progress.note,
            replace_all=self._state.needs_all_weights,
            deadline_at=interrupts.deadline_at,
        )
        concluded = await TwoPhase(
            self._runtime,
            order,
            interrupts,
            report,
            self._timings,
            before_commit,
            before_prepare,
        ).run()
        self._warnings += concluded.warnings
        return concluded

    async def _end_requests(self, message: str) -> int:
        gate = self._state.gate
        try:
            ending = self._runtime.abort(None, message)
            tally = await self._interrupts.guard(ending, cancellable=False)
        except RuntimeFault as fault:
            raise OrderFailed(fault_error(fault)) from fault
        outcomes = list(tally.outcomes.values())
        if AbortOutcome.FAILED in outcomes:
            stuck = RuntimeFault("REQUESTS_NOT_ENDED", "some request could not be ended")
            raise OrderFailed(fault_error(stuck))

        async def until_empty() -> None:
            while gate.in_flight:
                await gate.departure()

        await self._interrupts.guard(until_empty(), cancellable=False)
        return outcomes.count(AbortOutcome.ABORTED)

    async def _report(self, report: RankReport) -> None:
        try:
            await self._record(RankReported(report=report))
        except StoreUnavailable:
            # Ranks must not stay half way because a report about one cannot be written; the end
            # of the operation waits for the store.
            return

    async def _report_faults(self, report: RankReport) -> None:
        """Of a pause that belongs to the order: that a rank committed it is not that it committed
        the order."""
        if report.state not in (RankState.PREPARED, RankState.COMMITTED):
            await self._report(report)

    async def _record(
        self, fact: Fact, change: Change = NO_CHANGE, then: Callable[[], None] | None = None
    ) -> None:
        self._progress.drop()
        await self._journal.record(self._live, lambda _: fact, change=change, then=then)

    async def _succeed(self, ending: Ending) -> None:
        seen = await self._state.observe() if ending.change else None
        verification = Verification.VERIFIED
        warnings = self._warnings + ending.warnings
        if not ending.proved or not _shown(ending, seen):
            verification = Verification.UNVERIFIED
            warnings = (*warnings, _NOT_PROVED)

        def completed(counters: Counters) -> Fact:
            return Completed(
                result=ending.result(counters),
                revision=counters.revision,
                verification=verification,
            )

        def then() -> None:
            if ending.settle is not None:
                ending.settle(self._journal.counters, seen)

        for warning in warnings:
            await self._insist(_warned(warning), NO_CHANGE, None)
        await self._insist(completed, ending.change, then)

    async def _insist(
        self,
        fact_of: Callable[[Counters], Fact],
        change: Change,
        then: Callable[[], None] | None,
    ) -> None:
        self._progress.drop()
        await insist(self._state, self._live, fact_of, change=change, then=then)

    async def _end(self, end: _Unsuccessful) -> None:
        """Admission goes back to what it was before, and that whether it can be written or not."""

        def then() -> None:
            if end.lost:
                self._state.became_inconsistent(end.lost)
            self._put_back()

        self._progress.drop()
        change = REVISION if end.lost else self._errand.undo_change
        while True:
            try:
                await self._journal.record(
                    self._live,
                    lambda counters: end.fact(counters.revision),
                    change=change,
                    then=then,
                )
            except StoreUnavailable:
                then()
                await _store_is_back(self._state)
            else:
                return

    def _put_back(self) -> None:
        self._state.update_failed()
        undo, self._errand.undo = self._errand.undo, None
        if undo is not None:
            undo()


async def insist(
    state: EngineState,
    live: LiveOperation,
    fact_of: Callable[[Counters], Fact],
    *,
    change: Change = NO_CHANGE,
    then: Callable[[], None] | None = None,
) -> None:
    """Like `Journal.record`, and again for as long as the store cannot be written: nothing is told
    that is not written, and until then everything stays as it was."""
    while True:
        try:
            await state.journal.record(live, fact_of, change=change, then=then)
        except StoreUnavailable:
            await _store_is_back(state)
        else:
            return


async def _store_is_back(state: EngineState) -> None:
    state.changed()
    await asyncio.sleep(_RETRY_S)


async def _say_nothing(_: RankReport) -> None:
    """Whether a pause could be lifted says nothing about how the order went on the ranks."""


def _shown(ending: Ending, seen: Observation | None) -> bool:
    return ending.shows is None or (seen is not None and ending.shows(seen))


def _warned(warning: OperationWarning) -> Callable[[Counters], Fact]:
    return lambda _: Warned(warning=warning)


_NOT_PROVED = OperationWarning(
    "NOT_VERIFIED", "every rank committed, but not all of it could be read back"
)
