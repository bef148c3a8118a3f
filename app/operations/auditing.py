"""Audit entries of the use cases."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

from app.clock import Clock
from app.domain.errors import ChadburnError
from app.domain.kinds import Verification
from app.domain.operation import JsonObject, Operation
from app.ledger.errors import LedgerUnavailable
from app.ledger.ledger import Ledger
from app.ledger.values import AuditEntry
from app.operations.callers import Caller

log = logging.getLogger(__name__)


def entry_of(
    at: datetime,
    action: str,
    outcome: str,
    caller: Caller,
    *,
    engine_id: str | None = None,
    operation_id: str | None = None,
    reason: str | None = None,
    detail: JsonObject | None = None,
) -> AuditEntry:
    return AuditEntry(
        at=at,
        action=action,
        outcome=outcome,
        actor=caller.actor,
        engine_id=engine_id,
        operation_id=operation_id,
        reason=reason,
        note=caller.note,
        request_id=caller.request_id,
        trace_id=caller.trace_id,
        source=caller.source,
        detail=detail or {},
        scopes=caller.scopes,
    )


def end_entry(operation: Operation, at: datetime) -> AuditEntry:
    """How an order ended, under the name of who gave it."""
    settled = Verification.SETTLED
    return AuditEntry(
        at=at,
        action=operation.kind.value,
        outcome=operation.state.value,
        actor=operation.actor,
        engine_id=operation.engine_id,
        operation_id=operation.id,
        reason=None if operation.error is None else operation.error.reason,
        trace_id=operation.trace_id,
        detail={"verification": settled.value} if operation.verification is settled else {},
        scopes=(operation.kind.scope.value,),
    )


@asynccontextmanager
async def refusals_audited(
    ledger: Ledger,
    clock: Clock,
    action: str,
    caller: Caller,
    *,
    engine_id: str | None = None,
    operation_id: str | None = None,
) -> AsyncIterator[None]:
    """What is refused inside is written down and refused all the same."""
    try:
        yield
    except LedgerUnavailable:
        raise
    except ChadburnError as refused:
        entry = entry_of(
            clock.now(),
            action,
            "refused",
            caller,
            engine_id=engine_id,
            operation_id=operation_id or refused.operation_id,
            reason=refused.reason,
        )
        try:
            await ledger.audit.append(entry)
        except ChadburnError:
            log.exception("a refusal could not be audited")
        raise
