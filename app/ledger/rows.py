"""Rows to values and values to rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

from app.domain.capabilities import Capabilities
from app.domain.engine import (
    Dialect,
    Engine,
    HealthState,
    Member,
    Observed,
    Registration,
    TlsNames,
)
from app.domain.facts import EngineFacts
from app.domain.freezes import Freeze
from app.domain.kinds import OperationKind, OperationState, Verification
from app.domain.operation import (
    Actor,
    Operation,
    OperationError,
    OperationEvent,
    OperationWarning,
    Progress,
)
from app.domain.ranks import RankReport
from app.ledger.documents import document, json_object, read, read_each, shared_document
from app.ledger.values import AuditEntry, StoredAudit, StoredEvent

Values = dict[str, Any]


def actor_values(actor: Actor) -> Values:
    return {"issuer": actor.issuer, "subject": actor.subject, "client_id": actor.client_id}


def changing_values(operation: Operation) -> Values:
    """The columns that `advance` may change."""
    return {
        "state": operation.state.value,
        "sequence": operation.sequence,
        "engine_sequence": operation.engine_sequence,
        "engine_operation_id": operation.engine_operation_id,
        "engine_instance_id": operation.engine_instance_id,
        "revision": operation.revision,
        "started_at": operation.started_at,
        "ended_at": operation.ended_at,
        "cancel_requested": operation.cancel_requested,
        "result": None if operation.result is None else json_object(operation.result),
        "error": None if operation.error is None else document(operation.error),
        "verification": operation.verification and operation.verification.value,
        "warnings": document(operation.warnings),
        "ranks": document(operation.ranks),
        "progress": None if operation.progress is None else document(operation.progress),
    }


def operation_values(operation: Operation) -> Values:
    return {
        "id": operation.id,
        "engine_id": operation.engine_id,
        "kind": operation.kind.value,
        "takes_slot": operation.kind.exclusive,
        "request": json_object(operation.request),
        **actor_values(operation.actor),
        "created_at": operation.created_at,
        "idempotency_key": operation.idempotency_key,
        "reason": operation.reason,
        "expected_revision": operation.expected_revision,
        "deadline_at": operation.deadline_at,
        "trace_id": operation.trace_id,
        "override_freeze": operation.override_freeze,
        **changing_values(operation),
    }


def operation_of(row: Row[Any]) -> Operation:
    return Operation(
        id=row.id,
        engine_id=row.engine_id,
        kind=OperationKind(row.kind),
        state=OperationState(row.state),
        request=row.request,
        actor=Actor(row.issuer, row.subject, row.client_id),
        created_at=row.created_at,
        sequence=row.sequence,
        engine_sequence=row.engine_sequence,
        engine_operation_id=row.engine_operation_id,
        engine_instance_id=row.engine_instance_id,
        idempotency_key=row.idempotency_key,
        reason=row.reason,
        expected_revision=row.expected_revision,
        revision=row.revision,
        deadline_at=row.deadline_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        cancel_requested=row.cancel_requested,
        result=row.result,
        error=None if row.error is None else read(OperationError, row.error),
        verification=None if row.verification is None else Verification(row.verification),
        warnings=read_each(OperationWarning, row.warnings),
        ranks=read_each(RankReport, row.ranks),
        progress=None if row.progress is None else read(Progress, row.progress),
        queue_position=row.queue_position,
        trace_id=row.trace_id,
        override_freeze=row.override_freeze,
    )


def event_values(event: OperationEvent, kind: OperationKind, *, terminal: bool) -> Values:
    return {
        "operation_id": event.operation_id,
        "engine_id": event.engine_id,
        "kind": kind.value,
        "sequence": event.sequence,
        "engine_sequence": event.engine_sequence,
        "type": event.type,
        "terminal": terminal,
        "time": event.time,
        "data": json_object(event.data),
    }


def event_of(row: Row[Any]) -> StoredEvent:
    event = OperationEvent(
        operation_id=row.operation_id,
        engine_id=row.engine_id,
        sequence=row.sequence,
        type=row.type,
        time=row.time,
        data=row.data,
        engine_sequence=row.engine_sequence,
    )
    return StoredEvent(row.position, event, OperationKind(row.kind))


def audit_values(entry: AuditEntry) -> Values:
    return {
        "at": entry.at,
        "action": entry.action,
        "outcome": entry.outcome,
        **({} if entry.actor is None else actor_values(entry.actor)),
        "engine_id": entry.engine_id,
        "operation_id": entry.operation_id,
        "reason": entry.reason,
        "note": entry.note,
        "request_id": entry.request_id,
        "trace_id": entry.trace_id,
        "source": entry.source,
        "detail": json_object(entry.detail),
        "scopes": " ".join(entry.scopes) or None,
    }


def audit_of(row: Row[Any]) -> StoredAudit:
    actor = None if row.issuer is None else Actor(row.issuer, row.subject, row.client_id)
    entry = AuditEntry(
        at=row.at,
        action=row.action,
        outcome=row.outcome,
        actor=actor,
        engine_id=row.engine_id,
        operation_id=row.operation_id,
        reason=row.reason,
        note=row.note,
        request_id=row.request_id,
        trace_id=row.trace_id,
        source=row.source,
        detail=row.detail,
        scopes=tuple((row.scopes or "").split()),
    )
    return StoredAudit(row.id, entry)


def registration_values(registration: Registration) -> Values:
    """What a change may replace."""
    return {
        "dialect": registration.dialect.value,
        "members": document(registration.members),
        "tls": document(registration.tls),
        "labels": document(registration.labels),
        "updated_at": registration.updated_at,
    }


def observed_values(observed: Observed) -> Values:
    facts = observed.facts
    return {
        "health": observed.health.value,
        "observed_at": observed.observed_at,
        "role": None if facts is None else facts.role.value,
        "weight_version": None if facts is None else facts.weights.version,
        "document": {
            "facts": None if facts is None else document(facts),
            "capabilities": (
                None if observed.capabilities is None else shared_document(observed.capabilities)
            ),
            "info": json_object(observed.info),
            "models": [json_object(model) for model in observed.models],
        },
    }


def registration_of(row: Row[Any]) -> Registration:
    return Registration(
        id=row.id,
        dialect=Dialect(row.dialect),
        members=read_each(Member, row.members),
        tls=read(TlsNames, row.tls),
        labels=row.labels,
        generation=row.generation,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def engine_of(row: Row[Any]) -> Engine:
    """A row of `engines` joined with its observation, the id of its open exclusive operation
    (`running_operation`) and its freeze; each may be missing."""
    registration = registration_of(row)
    freeze = None if row.freeze_until is None else freeze_of(row)
    if row.health is None:
        return Engine(registration, Observed(), row.running_operation, freeze)
    facts, capabilities = row.document["facts"], row.document["capabilities"]
    observed = Observed(
        health=HealthState(row.health),
        observed_at=row.observed_at,
        facts=None if facts is None else read(EngineFacts, facts),
        capabilities=None if capabilities is None else read(Capabilities, capabilities),
        info=row.document["info"],
        models=tuple(row.document["models"]),
    )
    return Engine(registration, observed, row.running_operation, freeze)


def freeze_of(row: Row[Any]) -> Freeze:
    """Columns of `freezes`, each with `freeze_` in front."""
    return Freeze(
        reason=row.freeze_reason,
        until=row.freeze_until,
        since=row.freeze_since,
        by=Actor(row.freeze_issuer, row.freeze_subject, row.freeze_client_id),
    )


def freeze_values(freeze: Freeze) -> Values:
    return {
        "reason": freeze.reason,
        "until": freeze.until,
        "since": freeze.since,
        **actor_values(freeze.by),
    }
