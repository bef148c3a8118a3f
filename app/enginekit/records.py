"""Operations and events as rows of the engine's store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from app.domain.kinds import FailureEffect, OperationKind, OperationState, Verification
from app.domain.operation import (
    Actor,
    Operation,
    OperationError,
    OperationEvent,
    OperationWarning,
    Progress,
)
from app.domain.ranks import RankReport, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Which counters a step raises, by one each."""

    revision: bool = False
    pause_epoch: bool = False
    release_epoch: bool = False

    def __bool__(self) -> bool:
        return self.revision or self.pause_epoch or self.release_epoch


NO_CHANGE = Change()
REVISION = Change(revision=True)
EVERYTHING = Change(revision=True, pause_epoch=True, release_epoch=True)


@dataclass(frozen=True, slots=True)
class Counters:
    """They only rise, over every life of the engine."""

    revision: int
    pause_epoch: int
    release_epoch: int

    def after(self, change: Change) -> Counters:
        return Counters(
            self.revision + change.revision,
            self.pause_epoch + change.pause_epoch,
            self.release_epoch + change.release_epoch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A stored operation. `fingerprint` is of the call that made it; `accepted_revision` is what
    the engine stood at then."""

    operation: Operation
    fingerprint: str
    accepted_revision: int

    @property
    def key(self) -> str:
        return self.operation.idempotency_key or ""

    def at(self, operation: Operation) -> Record:
        return replace(self, operation=operation)


@dataclass(frozen=True, slots=True)
class FurtherKey:
    """Of a call that goes on with an operation; `fingerprint` is of that call."""

    key: str
    fingerprint: str


def operation_text(op: Operation) -> str:
    """JSON; `operation_from` reads it back."""
    progress, error, verification = op.progress, op.error, op.verification
    document: dict[str, Any] = {
        "id": op.id,
        "engine_id": op.engine_id,
        "kind": op.kind.value,
        "state": op.state.value,
        "request": dict(op.request),
        "actor": [op.actor.issuer, op.actor.subject, op.actor.client_id],
        "sequence": op.sequence,
        "instance_id": op.engine_instance_id,
        "key": op.idempotency_key,
        "expected_revision": op.expected_revision,
        "revision": op.revision,
        "created_at": op.created_at.isoformat(),
        "started_at": _text_of(op.started_at),
        "ended_at": _text_of(op.ended_at),
        "deadline_at": _text_of(op.deadline_at),
        "cancel_requested": op.cancel_requested,
        "result": None if op.result is None else dict(op.result),
        "error": None if error is None else _error_row(error),
        "verification": None if verification is None else verification.value,
        "warnings": [[warning.reason, warning.message] for warning in op.warnings],
        "ranks": [[report.rank, report.state.value, report.message] for report in op.ranks],
        "progress": None
        if progress is None
        else [progress.phase, progress.done, progress.total, progress.unit],
    }
    return json.dumps(document, separators=(",", ":"))


def operation_from(text: str) -> Operation:
    """Raises KeyError, TypeError or ValueError for what `operation_text` did not write."""
    row = json.loads(text)
    return Operation(
        id=row["id"],
        engine_id=row["engine_id"],
        kind=OperationKind(row["kind"]),
        state=OperationState(row["state"]),
        request=row["request"],
        actor=Actor(*row["actor"]),
        created_at=datetime.fromisoformat(row["created_at"]),
        sequence=row["sequence"],
        engine_instance_id=row["instance_id"],
        idempotency_key=row["key"],
        expected_revision=row["expected_revision"],
        revision=row["revision"],
        started_at=_time_of(row["started_at"]),
        ended_at=_time_of(row["ended_at"]),
        deadline_at=_time_of(row["deadline_at"]),
        cancel_requested=row["cancel_requested"],
        result=row["result"],
        error=_maybe(row["error"], _error_from),
        verification=_maybe(row["verification"], Verification),
        warnings=tuple(OperationWarning(*warning) for warning in row["warnings"]),
        ranks=tuple(RankReport(rank, RankState(s), text) for rank, s, text in row["ranks"]),
        progress=_maybe(row["progress"], lambda parts: Progress(*parts)),
    )


def event_row(event: OperationEvent) -> tuple[str, int, str, str, str]:
    """operation id, sequence, type, time, data."""
    data = json.dumps(dict(event.data), separators=(",", ":"))
    return event.operation_id, event.sequence, event.type, event.time.isoformat(), data


def event_from(row: tuple[str, int, str, str, str], engine_id: str) -> OperationEvent:
    operation_id, sequence, kind, time, data = row
    return OperationEvent(
        operation_id=operation_id,
        engine_id=engine_id,
        sequence=sequence,
        type=kind,
        time=datetime.fromisoformat(time),
        data=json.loads(data),
    )


def _error_row(error: OperationError) -> dict[str, Any]:
    return {
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "retryable": error.retryable,
        "ranks": list(error.ranks),
        "effect": error.effect.value,
    }


def _error_from(row: dict[str, Any]) -> OperationError:
    return OperationError(
        code=row["code"],
        reason=row["reason"],
        message=row["message"],
        retryable=row["retryable"],
        ranks=tuple(row["ranks"]),
        effect=FailureEffect(row["effect"]),
    )


def _text_of(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _time_of(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _maybe(value: Any, read: Callable[[Any], Any]) -> Any:
    return None if value is None else read(value)
