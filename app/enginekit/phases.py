"""Prepare on all ranks, commit on all ranks; interrupted by a deadline or a cancellation.

Nothing a runtime does may hang an order: what is cancelled and does not let go is left behind,
and its rank counts as one that did not do its part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from app.domain.command import Command
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import Conclusion, Order, Runtime, RuntimeFault

log = logging.getLogger(__name__)
T = TypeVar("T")

Report = Callable[[RankReport], Awaitable[None]]
Step = Callable[[Order, int], Awaitable[None]]
OnEachRank = Callable[[Step], Awaitable[None]]
"""A step on all ranks at once, which can be cancelled. What it raises is for the `TwoPhase`."""
BeforePrepare = Callable[[OnEachRank], Awaitable[Command]]
"""Gives the order that is then to be prepared."""


class CancelAsked(Exception):
    """Somebody cancels the order, and it can still be undone."""


class DeadlinePassed(Exception):
    pass


class OrderFailed(Exception):
    """`not_rolled_back`: ranks of which nothing is known any more; the engine is inconsistent."""

    def __init__(self, error: OperationError, not_rolled_back: tuple[int, ...] = ()) -> None:
        super().__init__(error.reason)
        self.error = error
        self.not_rolled_back = not_rolled_back


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds."""

    cancel_grace_s: float
    rollback_timeout_s: float
    straggler_s: float


class Interrupts:
    """What may end an order before its time. `deadline_at` is on the event loop's clock."""

    def __init__(self, deadline_at: float, timings: Timings) -> None:
        self.deadline_at = deadline_at
        self._timings = timings
        self.cancelled = asyncio.Event()

    async def guard(self, work: Coroutine[Any, Any, T], *, cancellable: bool) -> T:
        """The work's result. Raises CancelAsked or DeadlinePassed once the work has let go, or
        has had its time to."""
        loop = asyncio.get_running_loop()
        if cancellable and self.cancelled.is_set():
            work.close()
            raise CancelAsked
        task = asyncio.create_task(work, name=getattr(work, "__qualname__", "step"))
        cancelled = asyncio.ensure_future(self.cancelled.wait())
        waited: set[asyncio.Future[Any]] = {task, cancelled} if cancellable else {task}
        try:
            await asyncio.wait(
                waited,
                timeout=max(0.0, self.deadline_at - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if task.done():
                return task.result()
            # The work may itself wait for ranks to let go, hence twice the grace.
            await let_go({task}, 2 * self._timings.cancel_grace_s)
            if cancellable and self.cancelled.is_set():
                raise CancelAsked
            raise DeadlinePassed
        finally:
            cancelled.cancel()
            if not task.done():  # this very order is being left, the engine stops
                await let_go({task}, 2 * self._timings.cancel_grace_s)


async def let_go(tasks: set[asyncio.Task[T]], grace_s: float) -> set[asyncio.Task[T]]:
    """Cancel, and wait for as long as that may take. Returns those that are left behind."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return set()
    _, stuck = await asyncio.wait(tasks, timeout=grace_s)
    for task in stuck:
        log.error("a cancelled step does not let go and is left behind: %s", task.get_name())
    for task in tasks:
        task.add_done_callback(_look_at)
    return stuck


def _look_at(task: asyncio.Task[Any]) -> None:
    """What a cancelled step raised at last is of no interest, and no unseen error either."""
    if not task.cancelled():
        task.exception()


class TwoPhase:
    """One order's way over the ranks. `before_prepare` has steps of its own to take on the ranks;
    `before_commit` runs when all have prepared. What they raise ends the order like a fault of the
    preparation."""

    def __init__(
        self,
        runtime: Runtime,
        order: Order,
        interrupts: Interrupts,
        report: Report,
        timings: Timings,
        before_commit: Callable[[], Awaitable[None]] | None = None,
        before_prepare: BeforePrepare | None = None,
    ) -> None:
        self._runtime = runtime
        self._order = order
        self._interrupts = interrupts
        self._report = report
        self._timings = timings
        self._before_commit = before_commit
        self._before_prepare = before_prepare
        self._unfinished: set[int] = set()
        self._faults: dict[int, RuntimeFault] = {}  # in the order in which they came
        self._left_behind: set[int] = set()
        self._applied = False
        self.committing = False

    async def run(self) -> Conclusion:
        """Raises OrderFailed, CancelAsked or DeadlinePassed, each after a complete rollback; a
        rollback that is not complete is always OrderFailed with `not_rolled_back`."""
        try:
            if self._before_prepare is not None:
                command = await self._before_prepare(self._on_each_rank)
                self._order = replace(self._order, command=command)
            await self._phase(self._runtime.prepare, RankState.PREPARED, cancellable=True)
            if self._before_commit is not None:
                await self._before_commit()
            self.committing = True
            await self._phase(self._runtime.commit, RankState.COMMITTED, cancellable=False)
            return await self._interrupts.guard(self._conclude(), cancellable=False)
        except _Faults as failed:
            lost = await self._roll_back()
            raise OrderFailed(self._error(self._faults, lost), lost) from failed
        except OrderFailed as failed:  # of what had to come before the commit
            lost = await self._roll_back()
            raise OrderFailed(failed.error, (*failed.not_rolled_back, *lost)) from failed
        except (CancelAsked, DeadlinePassed) as interrupted:
            late = self._unfinished & set(self._runtime.ranks)
            lost = await self._roll_back()
            if self._faults:
                raise OrderFailed(self._error(self._faults, lost, late), lost) from interrupted
            if lost:
                raise OrderFailed(self._lost_error(late, lost), lost) from interrupted
            if isinstance(interrupted, DeadlinePassed):
                raise OrderFailed(deadline_error(tuple(sorted(late)), self._effect(()))) from None
            raise
        except Exception as error:
            log.exception("an order failed between the ranks")
            lost = await self._roll_back()
            faults = dict.fromkeys(self._unfinished or self._runtime.ranks, unexpected())
            raise OrderFailed(self._error(faults, lost), lost) from error

    async def _on_each_rank(self, step: Step) -> None:
        await self._phase(step, None, cancellable=True)

    async def _phase(self, step: Step, done: RankState | None, *, cancellable: bool) -> None:
        work = self._each_rank(step, done)
        await self._interrupts.guard(work, cancellable=cancellable)
        if self._faults:
            raise _Faults

    async def _each_rank(self, step: Step, done: RankState | None) -> None:
        """Ends with the first fault of a preparation. Others who commit get a little time after a
        fault, and no more: they may wait for the very rank that failed. `done` None: a rank that
        has done its part is not worth a report."""
        ranks = self._runtime.ranks
        name = "stage" if done is None else done.value
        self._unfinished = set(ranks)
        at_work = {
            asyncio.create_task(self._one(step, rank), name=f"{name} rank {rank}"): rank
            for rank in ranks
        }
        pending = set(at_work)
        patience = None
        try:
            while pending and not (self._faults and not self.committing):
                ended, pending = await asyncio.wait(
                    pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if not ended:
                    break
                for rank, fault in sorted((at_work[task], task.result()) for task in ended):
                    self._unfinished.discard(rank)
                    if fault is None:
                        if done is not None:
                            await self._report(RankReport(rank, done))
                    else:
                        self._faults[rank] = fault
                        await self._report(RankReport(rank, RankState.FAILED, fault.message))
                        patience = self._timings.straggler_s
        finally:
            stuck = await let_go(pending, self._timings.cancel_grace_s)
            self._left_behind = {at_work[task] for task in stuck}
        if self.committing:
            for rank in sorted(at_work[task] for task in pending):
                self._faults[rank] = _LATE
                await self._report(RankReport(rank, RankState.FAILED, _LATE.message))

    async def _one(self, step: Step, rank: int) -> RuntimeFault | None:
        try:
            await step(self._order, rank)
        except RuntimeFault as fault:
            return fault
        except Exception:
            log.exception("rank %d raised something unexpected", rank)
            return unexpected()
        return None

    async def _conclude(self) -> Conclusion:
        try:
            return await self._runtime.conclude(self._order)
        except RuntimeFault as fault:
            self._faults = dict.fromkeys(self._runtime.ranks, fault)
            raise _Faults from fault
        except Exception:
            log.exception("the runtime could not conclude an order")
            self._faults = dict.fromkeys(self._runtime.ranks, unexpected())
            raise _Faults from None

    async def _roll_back(self) -> tuple[int, ...]:
        """On every rank, whatever each had done. Returns those that are not as before, or of which
        that cannot be known: a commit that was left behind may take effect at any time."""
        tasks = {
            asyncio.create_task(
                self._one(self._runtime.rollback, rank), name=f"rollback {rank}"
            ): rank
            for rank in self._runtime.ranks
        }
        stuck = set(tasks)
        try:
            _, stuck = await asyncio.wait(stuck, timeout=self._timings.rollback_timeout_s)
        finally:
            await let_go(stuck, self._timings.cancel_grace_s)
        lost = []
        for task, rank in sorted(tasks.items(), key=lambda item: item[1]):
            if task in stuck:
                await self._report(RankReport(rank, RankState.UNKNOWN, "no answer to rollback"))
                lost.append(rank)
            elif (fault := task.result()) is not None:
                await self._report(RankReport(rank, RankState.FAILED, fault.message))
                self._applied = self._applied or fault.applied
                lost.append(rank)
            elif self.committing and rank in self._left_behind:
                await self._report(RankReport(rank, RankState.UNKNOWN, "does not let go"))
                lost.append(rank)
            else:
                await self._report(RankReport(rank, RankState.ROLLED_BACK))
        return tuple(lost)

    def _effect(self, lost: tuple[int, ...]) -> FailureEffect:
        """A preparation changes nothing that serves: a rank that is lost in it has applied nothing,
        however the rank itself is, but for one that says so of its rollback."""
        if not (self.committing or self._applied):
            return FailureEffect.NONE
        return FailureEffect.APPLIED_IN_PART if lost else FailureEffect.ROLLED_BACK

    def _error(
        self, faults: dict[int, RuntimeFault], lost: tuple[int, ...], late: Iterable[int] = ()
    ) -> OperationError:
        fault = next(iter(faults.values()))  # the first: others may follow from it
        return OperationError(
            code=fault.code,
            reason=fault.reason,
            message=fault.message,
            retryable=fault.retryable and not lost,
            ranks=tuple(sorted({*faults, *lost, *late})),
            effect=self._effect(lost),
        )

    def _lost_error(self, late: set[int], lost: tuple[int, ...]) -> OperationError:
        return OperationError(
            code="INTERNAL",
            reason="ROLLBACK_FAILED",
            message="the order was interrupted and could not be undone on every rank",
            ranks=tuple(sorted(late | set(lost))),
            effect=self._effect(lost),
        )


class _Faults(Exception):
    """Some rank failed; which, the `TwoPhase` knows."""


_LATE = RuntimeFault("RANK_LATE", "did not commit in time after another rank had failed")


def unexpected() -> RuntimeFault:
    """Stands for an exception whose text is for the log alone."""
    return RuntimeFault("INTERNAL", "the engine failed unexpectedly; its log says more")


def deadline_error(ranks: tuple[int, ...], effect: FailureEffect) -> OperationError:
    return OperationError(
        code="DEADLINE_EXCEEDED",
        reason="DEADLINE_EXCEEDED",
        message="the operation did not end within its deadline",
        retryable=True,
        ranks=ranks,
        effect=effect,
    )


def refusal_error(reason: str, message: str, *, retryable: bool = False) -> OperationError:
    """The state did not allow the order after all; nothing was done."""
    return OperationError(
        code="FAILED_PRECONDITION",
        reason=reason,
        message=message,
        retryable=retryable,
        effect=FailureEffect.NONE,
    )


def fault_error(fault: RuntimeFault) -> OperationError:
    """The engine as a whole could not do its part, before any rank was asked."""
    return OperationError(
        code=fault.code,
        reason=fault.reason,
        message=fault.message,
        retryable=fault.retryable,
        ranks=fault.ranks,
        effect=FailureEffect.NONE,
    )
