"""Domain values as messages of admin.proto."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

from google.rpc import code_pb2

from app.domain.events import EventType
from app.domain.kinds import FailureEffect, OperationKind, Verification
from app.domain.operation import JsonObject, Operation, OperationEvent, Progress
from app.domain.ranks import RankReport, RankState
from app.domain.transitions import error_data
from app.enginekit.records import Record
from app.enginekit.results import set_result
from app.enginekit.vocabulary import (
    FAILURE_EFFECT,
    OPERATION_KIND,
    OPERATION_STATE,
    RANK_STATE,
    VERIFICATION,
)
from app.rpc.openengine.v1 import admin_pb2

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def nanos(time: datetime | None) -> int:
    """Unix nanoseconds, exact to the microsecond; 0 for None."""
    return 0 if time is None else (time - _EPOCH) // timedelta(microseconds=1) * 1000


def event_message(record: Record, event: OperationEvent) -> admin_pb2.AdminOperationEvent:
    message = admin_pb2.AdminOperationEvent(
        operation_id=event.operation_id,
        sequence=event.sequence,
        time_unix_nanos=nanos(event.time),
    )
    data = cast("dict[str, Any]", event.data)
    match EventType(event.type):
        case EventType.ACCEPTED:
            message.accepted.CopyFrom(_accepted(record))
        case EventType.PROGRESS:
            message.progress.CopyFrom(_progress(Progress(**data)))
        case EventType.RANK:
            report = RankReport(data["rank"], RankState(data["state"]), data["message"])
            message.rank.CopyFrom(rank_message(report))
        case EventType.WARNING:
            message.warning.CopyFrom(admin_pb2.OperationWarning(**data))
        case EventType.COMPLETED:
            verification = Verification(data["verification"])
            message.completed.CopyFrom(
                _completed(record.operation.kind, data["result"], data["revision"], verification)
            )
        case EventType.FAILED:
            message.failed.CopyFrom(_failed(data["error"], data["revision"]))
        case EventType.CANCELLED:
            message.cancelled.CopyFrom(
                admin_pb2.OperationCancelled(message=data["message"], revision=data["revision"])
            )
        case other:
            raise ValueError(f"an engine has no events of type {other}")
    return message


def operation_message(record: Record) -> admin_pb2.AdminOperation:
    op = record.operation
    message = admin_pb2.AdminOperation(
        operation_id=op.id,
        idempotency_key=record.key,
        kind=OPERATION_KIND.number(op.kind),
        state=OPERATION_STATE.number(op.state),
        instance_id=op.engine_instance_id or "",
        last_sequence=op.sequence,
        created_unix_nanos=nanos(op.created_at),
        started_unix_nanos=nanos(op.started_at),
        ended_unix_nanos=nanos(op.ended_at),
        ranks=[rank_message(report) for report in op.ranks],
        warnings=[
            admin_pb2.OperationWarning(reason=warning.reason, message=warning.message)
            for warning in op.warnings
        ],
    )
    if op.kind is OperationKind.PROFILE:
        message.profile_id = op.id
    if op.progress is not None:
        message.progress.CopyFrom(_progress(op.progress))
    if op.done:
        _set_outcome(message, op)
    return message


def _set_outcome(message: admin_pb2.AdminOperation, op: Operation) -> None:
    revision = op.revision or 0
    if op.result is not None:
        verification = op.verification or Verification.UNVERIFIED
        message.completed.CopyFrom(_completed(op.kind, op.result, revision, verification))
    elif op.error is not None:
        message.failed.CopyFrom(_failed(error_data(op.error), revision))
    else:
        message.cancelled.CopyFrom(
            admin_pb2.OperationCancelled(message="cancelled, and undone", revision=revision)
        )


def rank_message(report: RankReport) -> admin_pb2.RankReport:
    return admin_pb2.RankReport(
        rank=report.rank, state=RANK_STATE.number(report.state), message=report.message
    )


def _accepted(record: Record) -> admin_pb2.OperationAccepted:
    return admin_pb2.OperationAccepted(
        kind=OPERATION_KIND.number(record.operation.kind),
        instance_id=record.operation.engine_instance_id or "",
        revision=record.accepted_revision,
    )


def _progress(progress: Progress) -> admin_pb2.OperationProgress:
    return admin_pb2.OperationProgress(
        phase=progress.phase, done=progress.done, total=progress.total, unit=progress.unit
    )


def _completed(
    kind: OperationKind, result: JsonObject, revision: int, verification: Verification
) -> admin_pb2.OperationCompleted:
    message = admin_pb2.OperationCompleted(
        changed=bool(result["changed"]),
        revision=revision,
        verification=VERIFICATION.number(verification),
    )
    set_result(message, kind, cast("dict[str, Any]", result))
    return message


def _failed(error: JsonObject, revision: int) -> admin_pb2.OperationFailed:
    told = cast("dict[str, Any]", error)
    return admin_pb2.OperationFailed(
        code=code_pb2.Code.Value(told["code"]),
        reason=told["reason"],
        message=told["message"],
        retryable=told["retryable"],
        ranks=told["ranks"],
        revision=revision,
        effect=FAILURE_EFFECT.number(FailureEffect(told["effect"])),
    )
