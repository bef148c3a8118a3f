"""After a backup was restored: orders that the ledger calls unsent, and that may have been sent."""

from __future__ import annotations

from app.clock import Clock
from app.domain.operation import Operation, OperationError
from app.domain.transitions import Advanced, Failed, advance
from app.ledger.ledger import Ledger
from app.ledger.values import AuditEntry

_REASON = "LEDGER_RESTORED"
_MESSAGE = (
    "the ledger was restored from a backup in which the order was not sent; "
    "it may have been sent and carried out after that"
)


async def end_unsent(ledger: Ledger, clock: Clock) -> int:
    """End what was accepted or queued when the backup was made, effect `unknown`; how many.

    Sent now, it would come a second time, long after its caller has seen how it ended; and ended
    for its deadline it would be said to have done nothing. What the backup calls sent is asked for
    at the engine instead. For a time when no gateway runs on this ledger.
    """
    unsent = [each for each in await ledger.operations.open_ones() if each.started_at is None]
    for operation in unsent:
        now = clock.now()
        error = OperationError("UNKNOWN", _REASON, _MESSAGE)
        step = advance(operation, Failed(error=error), now)
        assert isinstance(step, Advanced), "what is open may fail"
        await ledger.operations.record(operation, step, audit=_entry(step.operation))
    return len(unsent)


def _entry(ended: Operation) -> AuditEntry:
    assert ended.ended_at is not None
    return AuditEntry(
        at=ended.ended_at,
        action=ended.kind.value,
        outcome=ended.state.value,
        actor=ended.actor,
        engine_id=ended.engine_id,
        operation_id=ended.id,
        reason=_REASON,
        trace_id=ended.trace_id,
    )
