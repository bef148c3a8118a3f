"""One order, from its acceptance to its end, detached from whoever asked for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from app.domain.commands import Command
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError
from app.domain.ranks import RankReport
from app.domain.transitions import Cancelled, Completed, Fact, Failed, RankReported
from app.enginekit.carrying_out import CARRYING_OUT, Ending, Errand
from app.enginekit.journal import LiveOperation
from app.enginekit.phases import (
    CancelAsked,
    DeadlinePassed,
    Interrupts,
    OrderFailed,
    Timings,
    TwoPhase,
    deadline_error,
    unexpected,
)
from app.enginekit.progress import ProgressWriter
from app.enginekit.records import NO_CHANGE, REVISION, Change, Counters
from app.enginekit.refusals import StoreUnavailable
from app.enginekit.runtime import Conclusion, Order, Runtime
from app.enginekit.state import EngineState

log = logging.getLogger(__name__)

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    timings: Timings
    progress_interval_s: float


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
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._journal = state.journal
        self._live = live
        self._interrupts = interrupts
        self._timings = settings.timings
        self._progress = ProgressWriter(self._journal, live, settings.progress_interval_s)
        self._order = Order(
            operation_id=live.operation.id, command=command, report=self._progress.note
        )
        self._errand = Errand(
            operation=live.operation,
            command=command,
            state=state,
            interrupts=interrupts,
            started_at=state.now(),
            default_hold_limit_ms=default_hold_limit_ms,
            over_ranks=self._over_ranks,
            record=self._record,
            report=self._progress.note,
        )

    async def run(self) -> None:
        try:
            await self._carry_out()
        except Exception:
            # The store holds something else than this process wrote: the operation stays open
            # and keeps the engine from further orders, but requests must not wait for it.
            log.exception("an order could not be ended")
            self._put_back()
        finally:
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

    async def _over_ranks(self) -> Conclusion:
        return await TwoPhase(
            self._runtime,
            self._order,
            self._interrupts,
            self._report,
            self._timings,
        ).run()

    async def _report(self, report: RankReport) -> None:
        try:
            await self._record(RankReported(report=report))
        except StoreUnavailable:
            # Ranks must not stay half way because a report about one cannot be written; the end
            # of the operation waits for the store.
            return

    async def _record(
        self, fact: Fact, change: Change = NO_CHANGE, then: Callable[[], None] | None = None
    ) -> None:
        self._progress.drop()
        await self._journal.record(self._live, lambda _: fact, change=change, then=then)

    async def _succeed(self, ending: Ending) -> None:
        seen = await self._state.observe() if ending.change else None

        def completed(counters: Counters) -> Fact:
            return Completed(result=ending.result(counters), revision=counters.revision)

        def then() -> None:
            if ending.settle is not None:
                ending.settle(self._journal.counters, seen)

        self._progress.drop()
        while True:
            try:
                await self._journal.record(self._live, completed, change=ending.change, then=then)
            except StoreUnavailable:
                # Nothing is told that is not written: admission too stays as it was until then.
                await self._store_is_back()
            else:
                return

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
                await self._store_is_back()
            else:
                return

    def _put_back(self) -> None:
        undo, self._errand.undo = self._errand.undo, None
        if undo is not None:
            undo()

    async def _store_is_back(self) -> None:
        self._state.changed()
        await asyncio.sleep(_RETRY_S)
