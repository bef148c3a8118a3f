"""Pauses: those that are ordered, and those that another order makes for itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import cast

from app.domain.commands import Pause, Resume
from app.domain.kinds import Admission, DrainRule, NewRequests, PauseMode
from app.domain.operation import JsonObject, OperationError, OperationWarning, Progress
from app.domain.transitions import Progressed, Warned
from app.enginekit.errands import Ending, Errand
from app.enginekit.gate import NewRequestRule
from app.enginekit.phases import OrderFailed, refusal_error
from app.enginekit.records import NO_CHANGE, REVISION, Change, Counters
from app.enginekit.refusals import StoreUnavailable
from app.enginekit.runtime import Conclusion, Observation, RuntimeFault, SharedRuntime
from app.enginekit.state import HeldPause

PAUSED = Change(revision=True, pause_epoch=True)

PAUSE_NOT_LIFTED = OperationWarning(
    "PAUSE_NOT_LIFTED",
    "the ranks did not lift the pause that the order made for itself: resume it",
)
_ENDED_IN_VAIN = Warned(
    warning=OperationWarning(
        "REQUESTS_MAY_HAVE_ENDED",
        "the pause did not take effect, but some rank may have ended requests already",
    )
)


async def pause(errand: Errand) -> Ending:
    """A pause that says what the one in force says changes nothing; one that says something else
    takes its place under a new epoch. Only a change of the mode reaches the ranks."""
    command = cast("Pause", errand.command)
    state = errand.state
    coming = _coming(errand, command)
    in_force = state.pause
    if in_force is not None and (in_force.mode, in_force.rule) == (command.mode, coming.rule):
        return Ending(result=_pause_result(changed=False, kept=state.frozen))
    if in_force is not None and in_force.mode is command.mode:
        errand.undo = state.pause_withdrawn
        state.gate.close(coming.rule)
        return _paused(coming, errand, Conclusion(requests_kept=state.frozen), finished=0)
    conclusion, finished = await _close(errand, command, coming, part="")
    return _paused(coming, errand, conclusion, finished=finished)


def _coming(errand: Errand, command: Pause) -> HeldPause:
    return HeldPause(
        mode=command.mode,
        rule=_rule(command, errand.default_hold_limit_ms),
        epoch=0,
        operation_id=errand.operation.id,
        idempotency_key=errand.operation.idempotency_key or "",
        since=errand.started_at,
    )


async def _close(
    errand: Errand, command: Pause, coming: HeldPause, *, part: str
) -> tuple[Conclusion, int]:
    """Close the gate, drain, and pause the ranks. With the requests that a drain let finish."""
    state, gate = errand.state, errand.state.gate
    errand.undo = state.pause_withdrawn
    gate.close(coming.rule)
    finished = gate.finished
    if command.mode is PauseMode.DRAIN and gate.admission is Admission.OPEN:
        await _drain(errand, coming)
    finished = gate.finished - finished if command.mode is PauseMode.DRAIN else 0
    try:
        conclusion = await errand.over_ranks(command, part=part)
    except OrderFailed:
        if command.mode is PauseMode.ABORT:
            await errand.record(_ENDED_IN_VAIN)
        raise
    return conclusion, finished


async def _drain(errand: Errand, coming: HeldPause) -> None:
    """Until nothing is in flight. Raises CancelAsked or DeadlinePassed."""
    state, gate = errand.state, errand.state.gate
    total = gate.in_flight

    def now_at() -> Progress:
        return Progress("draining", total - gate.in_flight, total, "requests")

    if not total and not await _others(errand):
        await errand.record(Progressed(progress=now_at()))
        return
    # Admission is a fact: it raises the revision on the way out and on the way back.
    errand.undo_change = REVISION
    await errand.record(Progressed(progress=now_at()), REVISION, lambda: state.pause_began(coming))

    async def until_empty() -> None:
        while gate.in_flight:
            errand.report(now_at())
            await gate.departure()

    await errand.interrupts.guard(until_empty(), cancellable=True)
    await errand.record(Progressed(progress=now_at()))


async def _others(errand: Errand) -> int:
    """Requests past the gate, for which the ranks wait. Who does not say has none."""
    runtime = errand.runtime
    if not isinstance(runtime, SharedRuntime):
        return 0
    try:
        return await errand.interrupts.guard(runtime.others(), cancellable=True)
    except RuntimeFault:
        return 0


def _paused(coming: HeldPause, errand: Errand, conclusion: Conclusion, *, finished: int) -> Ending:
    state = errand.state

    def settle(counters: Counters, seen: Observation | None) -> None:
        state.pause_took_effect(coming.in_force(counters.pause_epoch, state.now()), seen)

    return Ending(
        result=_pause_result(
            changed=True,
            finished=finished,
            aborted=conclusion.requests_aborted,
            kept=conclusion.requests_kept,
        ),
        change=PAUSED,
        settle=settle,
    )


def _pause_result(
    *, changed: bool, finished: int = 0, aborted: int = 0, kept: int = 0
) -> Callable[[Counters], JsonObject]:
    return lambda counters: {
        "changed": changed,
        "pause_epoch": counters.pause_epoch,
        "requests_finished": finished,
        "requests_aborted": aborted,
        "requests_kept": kept,
    }


def _rule(command: Pause, default_hold_limit_ms: int) -> NewRequestRule:
    limit = command.hold_limit_ms or default_hold_limit_ms
    if command.new_requests is NewRequests.REFUSE:
        limit = default_hold_limit_ms
    return NewRequestRule(command.new_requests, limit)


async def resume(errand: Errand) -> Ending:
    state = errand.state
    conclusion = await errand.over_ranks()
    admitted = state.gate.held
    return Ending(
        result=lambda counters: {
            "changed": True,
            "pause_epoch": counters.pause_epoch,
            "requests_continued": conclusion.requests_continued,
            "requests_admitted": admitted,
        },
        change=REVISION,
        settle=lambda _, seen: state.resumed(seen),
    )


# ---- pauses that belong to another order ----


@dataclass(slots=True)
class OwnPause:
    """What an order has done to admission for its own sake. `holds`: it made a pause, which is a
    fact like any other, with an epoch, and is in force until it is lifted."""

    holds: bool = False
    finished: int = 0
    aborted: int = 0

    async def make(self, errand: Errand, command: Pause) -> None:
        """On an engine that is open. Raises like `pause`; then it does not hold."""
        state = errand.state
        coming = _coming(errand, command)
        conclusion, self.finished = await _close(errand, command, coming, part="pause")
        self.aborted = conclusion.requests_aborted

        def took_effect() -> None:
            epoch = state.journal.counters.pause_epoch
            state.pause_took_effect(coming.in_force(epoch, state.now()), None)
            errand.undo, errand.undo_change = None, NO_CHANGE
            self.holds = True

        try:
            await errand.record(Progressed(progress=Progress("paused")), PAUSED, took_effect)
        except StoreUnavailable:
            # Not told, so it is not so: the ranks must not stay closed behind an open gate.
            await _lift_ranks(errand)
            raise

    async def close(self, errand: Errand, drain: DrainRule) -> None:
        """Nothing runs afterwards. What a pause has frozen is ended by ABORT alone."""
        gate = errand.state.gate
        if gate.admission is Admission.OPEN:
            mode = PauseMode.ABORT if drain is DrainRule.ABORT else PauseMode.DRAIN
            command = Pause(model=errand.command.model, mode=mode)
            if drain is DrainRule.REFUSE:
                errand.undo = errand.state.pause_withdrawn
                gate.close(_rule(command, errand.default_hold_limit_ms))
                if gate.in_flight:
                    raise OrderFailed(_IN_FLIGHT)
            await self.make(errand, command)
        elif drain is DrainRule.ABORT and gate.in_flight:
            self.aborted = await errand.end_requests("ended by an administrator")

    async def lift(self, errand: Errand) -> bool:
        """After the order has succeeded: whether the ranks serve again. The gate is opened with
        the order's end. Raises OrderFailed when some rank is neither paused nor resumed."""
        return self.holds and await _lift_ranks(errand)

    @asynccontextmanager
    async def lifted_on_failure(self, errand: Errand) -> AsyncIterator[None]:
        """What fails inside leaves admission as it was, unless ranks are lost over it: then the
        pause stays, and it is said that somebody has to lift it once they are mended."""
        try:
            yield
        except OrderFailed as failed:
            if not failed.not_rolled_back:
                await self._give_up(errand)
            elif self.holds:
                with suppress(StoreUnavailable):  # the failure itself waits for the store
                    await errand.record(Warned(warning=PAUSE_NOT_LIFTED))
            raise
        except Exception:
            await self._give_up(errand)
            raise

    async def _give_up(self, errand: Errand) -> None:
        if not self.holds:
            return
        if await _lift_ranks(errand):
            errand.undo_change = REVISION
            errand.undo = lambda: errand.state.resumed(None)
        else:
            await errand.record(Warned(warning=PAUSE_NOT_LIFTED))


async def _lift_ranks(errand: Errand) -> bool:
    epoch = errand.state.journal.counters.pause_epoch
    command = Resume(model=errand.command.model, pause_epoch=epoch)
    try:
        await errand.over_ranks(command, part="resume", rescue=True)
    except OrderFailed as failed:
        if failed.not_rolled_back:
            raise
        return False
    return True


_IN_FLIGHT: OperationError = refusal_error(
    "REQUESTS_IN_FLIGHT", "requests came in flight before admission was closed", retryable=True
)
