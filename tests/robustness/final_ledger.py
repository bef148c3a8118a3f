"""The whole ledger, written into a history when nothing goes on any more."""

from __future__ import annotations

from app.domain.events import TERMINAL_EVENTS
from app.domain.kinds import Verification
from app.domain.operation import Operation
from app.http.documents.operation import OperationDocument
from app.ledger import Ledger
from tests.ledger.samples import all_events, all_operations
from tests.robustness.clients import end_of
from tests.robustness.history import LedgerEvent, LedgerOperation, LedgerRead, Recorder


async def write_ledger(recorder: Recorder, ledger: Ledger) -> list[Operation]:
    """All operations, oldest first."""
    operations = await all_operations(ledger)
    for ordinal, operation in enumerate(operations, 1):
        recorder.write(_operation(ordinal, operation))
    for stored in await all_events(ledger):
        event = stored.event
        recorder.write(
            LedgerEvent(
                position=stored.position,
                operation=event.operation_id,
                engine=event.engine_id,
                sequence=event.sequence,
                type=event.type,
                terminal=event.type in TERMINAL_EVENTS,
            )
        )
    recorder.write(LedgerRead(pruned_to=await ledger.events.oldest()))
    return operations


def _operation(ordinal: int, operation: Operation) -> LedgerOperation:
    deadline, ended, error = operation.deadline_at, operation.ended_at, operation.error
    return LedgerOperation(
        ordinal=ordinal,
        operation=operation.id,
        engine=operation.engine_id,
        kind=operation.kind.value,
        exclusive=operation.kind.exclusive,
        state=operation.state.value,
        done=operation.done,
        sequence=operation.sequence,
        principal=f"{operation.actor.subject}/{operation.actor.client_id}",
        key=operation.idempotency_key,
        deadline=None if deadline is None else deadline.timestamp(),
        ended=None if ended is None else ended.timestamp(),
        effect=None if error is None else error.effect.value,
        settled=operation.verification is Verification.SETTLED,
        end=end_of(OperationDocument.of(operation).model_dump(mode="json")),
    )
