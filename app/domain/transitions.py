"""The one transition table: what may follow what, and the event that says so.

`advance` is total: every pair of an operation and a fact gives either the next operation with at
most one event, or a typed refusal. Nothing else in the system decides a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from app.domain.events import EventType
from app.domain.kinds import OperationState, Verification
from app.domain.operation import (
    JsonObject,
    JsonValue,
    Operation,
    OperationError,
    OperationEvent,
    OperationWarning,
    Progress,
)
from app.domain.ranks import RankReport, with_report

# ---- facts ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that has happened. `engine_sequence` is set on what the engine itself reported."""

    engine_sequence: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued(Fact):
    """It waits for the engine's running exclusive operation. `position`: 1 = next."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched(Fact):
    """Written before the order is sent: from here on the engine may have it."""

    instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Fact):
    """An engine begins an operation of its own store. Says nothing to observers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccepted(Fact):
    """The engine acknowledged the order and gave it an id of its own."""

    engine_operation_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(Fact):
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued(Fact):
    """A further call that the operation is ordered by was taken on; it is sent in its turn."""

    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReported(Fact):
    report: RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Fact):
    warning: OperationWarning


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(Fact):
    """The engine has been, or is about to be, asked to cancel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeUnknown(Fact):
    """Sent, and no reply that settles it: the engine must be asked."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reattached(Fact):
    """The engine was asked and still runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAgain(Fact):
    """Written before it is sent once more under the same key: a read-back from the very process
    it was sent to has shown that it was never taken on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed(Fact):
    result: JsonObject
    revision: int | None = None
    verification: Verification = Verification.VERIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Fact):
    error: OperationError
    revision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Fact):
    message: str
    revision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Fact):
    """A person states the end of an operation whose outcome nobody can read back.

    `by`: the subject who states it. `reason`: how they know. `message`: what readers of the
    operation are told of a failure; empty: the reason.
    """

    end: OperationState
    by: str
    reason: str
    message: str = ""


# ---- outcome of advance ----


class Refusal(StrEnum):
    ENDED = "ended"  # terminal states never change
    OUT_OF_ORDER = "out_of_order"  # the fact does not fit the state
    SEEN = "seen"  # the engine's event is not newer than the last one taken


@dataclass(frozen=True, slots=True)
class Advanced:
    operation: Operation
    event: OperationEvent | None


@dataclass(frozen=True, slots=True)
class Rejected:
    refusal: Refusal


# ---- the table ----

_S = OperationState
_UNSENT = frozenset({_S.ACCEPTED, _S.QUEUED})
_LIVE = frozenset({_S.RUNNING, _S.CANCELLING})
_SENT = _LIVE | {_S.RECONCILING}
_OPEN = _UNSENT | _SENT

ALLOWED: Mapping[type[Fact], frozenset[OperationState]] = {
    Queued: frozenset({_S.ACCEPTED}),
    Dispatched: _UNSENT,
    Started: frozenset({_S.ACCEPTED}),
    EngineAccepted: _LIVE,
    Progressed: _LIVE,
    Continued: frozenset({_S.ACCEPTED, _S.QUEUED, _S.RUNNING, _S.RECONCILING}),
    RankReported: _LIVE,
    Warned: _SENT,
    CancelRequested: frozenset({_S.RUNNING}),
    OutcomeUnknown: _LIVE,
    Reattached: frozenset({_S.RECONCILING}),
    SentAgain: frozenset({_S.RECONCILING}),
    Completed: _SENT,
    Failed: _OPEN,
    Cancelled: _OPEN,
    Settled: frozenset({_S.RECONCILING}),
}

_Step = tuple[Operation, EventType | None, JsonObject]


def progress_data(progress: Progress) -> JsonObject:
    return {
        "phase": progress.phase,
        "done": progress.done,
        "total": progress.total,
        "unit": progress.unit,
    }


def error_data(error: OperationError) -> JsonObject:
    ranks: list[JsonValue] = list(error.ranks)
    return {
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "retryable": error.retryable,
        "ranks": ranks,
        "effect": error.effect.value,
    }


def _queued(op: Operation, fact: Queued, _at: datetime) -> _Step:
    waits = replace(op, state=_S.QUEUED, queue_position=fact.position)
    return waits, EventType.QUEUED, {"queue_position": fact.position}


def _dispatched(op: Operation, fact: Dispatched, at: datetime) -> _Step:
    sent = replace(op, state=_S.RUNNING, started_at=at, engine_instance_id=fact.instance_id)
    return sent, EventType.DISPATCHED, {}


def _started(op: Operation, _fact: Started, at: datetime) -> _Step:
    return replace(op, state=_S.RUNNING, started_at=at), None, {}


def _engine_accepted(op: Operation, fact: EngineAccepted, _at: datetime) -> _Step:
    progress = Progress("accepted_by_engine")
    taken = replace(
        op,
        engine_operation_id=fact.engine_operation_id,
        engine_instance_id=fact.instance_id or op.engine_instance_id,
        progress=progress,
    )
    return taken, EventType.PROGRESS, progress_data(progress)


def _progressed(op: Operation, fact: Progressed | Continued, _at: datetime) -> _Step:
    data = progress_data(fact.progress)
    return replace(op, progress=fact.progress), EventType.PROGRESS, data


def _rank_reported(op: Operation, fact: RankReported, _at: datetime) -> _Step:
    report = fact.report
    data: JsonObject = {
        "rank": report.rank,
        "state": report.state.value,
        "message": report.message,
    }
    return replace(op, ranks=with_report(op.ranks, report)), EventType.RANK, data


def _warned(op: Operation, fact: Warned, _at: datetime) -> _Step:
    data: JsonObject = {"reason": fact.warning.reason, "message": fact.warning.message}
    return replace(op, warnings=(*op.warnings, fact.warning)), EventType.WARNING, data


def _cancel_requested(op: Operation, _fact: CancelRequested, _at: datetime) -> _Step:
    progress = Progress("cancelling")
    asked = replace(op, state=_S.CANCELLING, cancel_requested=True, progress=progress)
    return asked, EventType.PROGRESS, progress_data(progress)


def _outcome_unknown(op: Operation, fact: OutcomeUnknown, _at: datetime) -> _Step:
    return replace(op, state=_S.RECONCILING), EventType.RECONCILING, {"message": fact.message}


def _attended(op: Operation) -> OperationState:
    return _S.CANCELLING if op.cancel_requested else _S.RUNNING


def _reattached(op: Operation, _fact: Reattached, _at: datetime) -> _Step:
    progress = Progress("reattached")
    again = replace(op, state=_attended(op), progress=progress)
    return again, EventType.PROGRESS, progress_data(progress)


def _sent_again(op: Operation, _fact: SentAgain, _at: datetime) -> _Step:
    # `started_at` stays: the deadline that travels with the order is measured from it, and the
    # same key must come with the same payload.
    return replace(op, state=_attended(op)), EventType.DISPATCHED, {"again": True}


def _completed(op: Operation, fact: Completed, at: datetime) -> _Step:
    ended = replace(
        op,
        state=_S.SUCCEEDED,
        ended_at=at,
        result=fact.result,
        revision=fact.revision,
        verification=fact.verification,
    )
    data: JsonObject = {
        "result": dict(fact.result),
        "revision": fact.revision,
        "verification": fact.verification.value,
    }
    return ended, EventType.COMPLETED, data


def _failed(op: Operation, fact: Failed, at: datetime) -> _Step:
    ended = replace(op, state=_S.FAILED, ended_at=at, error=fact.error, revision=fact.revision)
    data: JsonObject = {"error": dict(error_data(fact.error)), "revision": fact.revision}
    return ended, EventType.FAILED, data


def _cancelled(op: Operation, fact: Cancelled, at: datetime) -> _Step:
    ended = replace(op, state=_S.CANCELLED, ended_at=at, revision=fact.revision)
    return ended, EventType.CANCELLED, {"message": fact.message, "revision": fact.revision}


def _settled(op: Operation, fact: Settled, at: datetime) -> _Step:
    error = None
    if fact.end is _S.FAILED:
        message = fact.message or fact.reason
        error = OperationError(code="UNKNOWN", reason="SETTLED", message=message)
    ended = replace(op, state=fact.end, ended_at=at, error=error, verification=Verification.SETTLED)
    data: JsonObject = {
        "state": fact.end.value,
        "by": fact.by,
        "reason": fact.reason,
        "message": fact.message,
    }
    return ended, EventType.SETTLED, data


_STEPS: Mapping[type[Fact], Callable[..., _Step]] = {
    Queued: _queued,
    Dispatched: _dispatched,
    Started: _started,
    EngineAccepted: _engine_accepted,
    Progressed: _progressed,
    Continued: _progressed,
    RankReported: _rank_reported,
    Warned: _warned,
    CancelRequested: _cancel_requested,
    OutcomeUnknown: _outcome_unknown,
    Reattached: _reattached,
    SentAgain: _sent_again,
    Completed: _completed,
    Failed: _failed,
    Cancelled: _cancelled,
    Settled: _settled,
}


def advance(op: Operation, fact: Fact, at: datetime) -> Advanced | Rejected:
    """Take one fact. `at` is the time of the event; the caller owns the clock."""
    if op.state.terminal:
        return Rejected(Refusal.ENDED)
    if op.state not in ALLOWED[type(fact)]:
        return Rejected(Refusal.OUT_OF_ORDER)
    if isinstance(fact, Settled) and not fact.end.terminal:
        return Rejected(Refusal.OUT_OF_ORDER)
    seen = fact.engine_sequence
    if seen is not None and seen <= op.engine_sequence:
        # A re-attached stream replays from the engine's first event.
        return Rejected(Refusal.SEEN)
    after, event_type, data = _STEPS[type(fact)](op, fact, at)
    if after.state is not _S.QUEUED:
        after = replace(after, queue_position=None)
    if seen is not None:
        after = replace(after, engine_sequence=seen)
    if event_type is None:
        return Advanced(after, None)
    after = replace(after, sequence=op.sequence + 1)
    return Advanced(after, _event(after, event_type, data, at, seen))


def accepted_event(op: Operation) -> OperationEvent:
    """The first event of a new operation, number 1."""
    return _event(op, EventType.ACCEPTED, {"kind": op.kind.value}, op.created_at, None)


def _event(
    op: Operation, event_type: EventType, data: JsonObject, at: datetime, seen: int | None
) -> OperationEvent:
    return OperationEvent(
        operation_id=op.id,
        engine_id=op.engine_id,
        sequence=op.sequence,
        type=event_type.value,
        time=at,
        data=data,
        engine_sequence=seen,
    )
