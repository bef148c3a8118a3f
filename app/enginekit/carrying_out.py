"""What each kind of order does, once accepted: admission, ranks, and the facts it changes.

A new kind is a reader in `requests`, a function here, a row in `CARRYING_OUT`, and the form of its
result in `wire`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import cast

from app.domain.commands import Command, FlushCaches, Pause
from app.domain.kinds import Admission, NewRequests, OperationKind, PauseMode
from app.domain.operation import JsonObject, JsonValue, Operation, OperationWarning, Progress
from app.domain.transitions import Fact, Progressed, Warned
from app.enginekit.gate import NewRequestRule
from app.enginekit.phases import Interrupts, OrderFailed
from app.enginekit.records import NO_CHANGE, REVISION, Change, Counters
from app.enginekit.runtime import Conclusion, Observation
from app.enginekit.state import EngineState, HeldPause

PAUSED = Change(revision=True, pause_epoch=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an order succeeds. `settle` runs between the commit and the telling."""

    result: Callable[[Counters], JsonObject]
    change: Change = NO_CHANGE
    settle: Callable[[Counters, Observation | None], None] | None = None


@dataclass(slots=True, kw_only=True)
class Errand:
    """An order that is being carried out, and what it may use.

    `undo` is what a failure or a cancellation has to put back in admission, with the counters
    that this raises.
    """

    operation: Operation
    command: Command
    state: EngineState
    interrupts: Interrupts
    started_at: datetime
    default_hold_limit_ms: int
    over_ranks: Callable[[], Awaitable[Conclusion]]
    record: Callable[[Fact, Change, Callable[[], None] | None], Awaitable[None]]
    report: Callable[[Progress], None]
    undo: Callable[[], None] | None = None
    undo_change: Change = field(default=NO_CHANGE)


async def flush_caches(errand: Errand) -> Ending:
    command = cast("FlushCaches", errand.command)
    conclusion = await errand.over_ranks()
    asked = set(command.caches)
    caches: list[JsonValue] = [
        {
            "kind": flushed.kind.value,
            "blocks_freed": flushed.blocks_freed,
            "blocks_in_use": flushed.blocks_in_use,
        }
        for flushed in conclusion.flushed
        if flushed.kind in asked
    ]
    return Ending(
        result=lambda _: {"changed": conclusion.changed, "caches": caches},
        change=REVISION if conclusion.changed else NO_CHANGE,
        settle=_only_look(errand) if conclusion.changed else None,
    )


async def pause(errand: Errand) -> Ending:
    """A pause that says what the one in force says changes nothing; one that says something else
    takes its place under a new epoch. Only a change of the mode reaches the ranks."""
    command = cast("Pause", errand.command)
    state, gate = errand.state, errand.state.gate
    rule = _rule(command, errand.default_hold_limit_ms)
    in_force = state.pause
    if in_force is not None and (in_force.mode, in_force.rule) == (command.mode, rule):
        return Ending(result=_pause_result(changed=False, kept=state.frozen))
    coming = HeldPause(
        mode=command.mode,
        rule=rule,
        epoch=0,
        operation_id=errand.operation.id,
        idempotency_key=errand.operation.idempotency_key or "",
        since=errand.started_at,
    )
    errand.undo = state.pause_withdrawn
    gate.close(rule)
    if in_force is not None and in_force.mode is command.mode:
        return _paused(errand, coming, Conclusion(requests_kept=state.frozen), finished=0)
    finished = gate.finished
    if command.mode is PauseMode.DRAIN and gate.admission is Admission.OPEN:
        await _drain(errand, coming)
    finished = gate.finished - finished if command.mode is PauseMode.DRAIN else 0
    try:
        conclusion = await errand.over_ranks()
    except OrderFailed:
        if command.mode is PauseMode.ABORT:
            await errand.record(_ENDED_IN_VAIN, NO_CHANGE, None)
        raise
    return _paused(errand, coming, conclusion, finished=finished)


async def _drain(errand: Errand, coming: HeldPause) -> None:
    """Until nothing is in flight. Raises CancelAsked or DeadlinePassed."""
    state, gate = errand.state, errand.state.gate
    total = gate.in_flight

    def now_at() -> Progress:
        return Progress("draining", total - gate.in_flight, total, "requests")

    if not total:
        await errand.record(Progressed(progress=now_at()), NO_CHANGE, None)
        return
    # Admission is a fact: it raises the revision on the way out and on the way back.
    errand.undo_change = REVISION
    await errand.record(Progressed(progress=now_at()), REVISION, lambda: state.pause_began(coming))

    async def until_empty() -> None:
        while gate.in_flight:
            errand.report(now_at())
            await gate.departure()

    await errand.interrupts.guard(until_empty(), cancellable=True)
    await errand.record(Progressed(progress=now_at()), NO_CHANGE, None)


def _paused(errand: Errand, coming: HeldPause, conclusion: Conclusion, *, finished: int) -> Ending:
    state = errand.state

    def settle(counters: Counters, seen: Observation | None) -> None:
        held = HeldPause(
            mode=coming.mode,
            rule=coming.rule,
            epoch=counters.pause_epoch,
            operation_id=coming.operation_id,
            idempotency_key=coming.idempotency_key,
            since=state.now(),
        )
        state.pause_took_effect(held, seen)

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


def _only_look(errand: Errand) -> Callable[[Counters, Observation | None], None]:
    return lambda _, seen: errand.state.order_ended(seen)


CARRYING_OUT: Mapping[OperationKind, Callable[[Errand], Awaitable[Ending]]] = {
    OperationKind.FLUSH_CACHES: flush_caches,
    OperationKind.PAUSE: pause,
    OperationKind.RESUME: resume,
}

_ENDED_IN_VAIN = Warned(
    warning=OperationWarning(
        "REQUESTS_MAY_HAVE_ENDED",
        "the pause did not take effect, but some rank may have ended requests already",
    )
)
