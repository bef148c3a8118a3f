"""Operations: taken on once, and changed only by conditional writes."""

from __future__ import annotations

from app.domain.operation import Actor, Operation
from app.domain.transitions import Advanced
from app.ledger.values import Accepted, AuditEntry, KeyClaim, Lease, OperationFilter, Page


class Operations:
    async def accept(
        self,
        operation: Operation,
        *,
        key: KeyClaim | None,
        audit: AuditEntry,
        queued: bool = False,
    ) -> Accepted:
        """Take on a new operation (`accepted`, sequence 1): its row, its key, its first event and
        the audit entry, in one transaction. `queued`: it goes on to `queued` in the same one, and
        does not take the engine's slot.

        A key used before for the same request gives that operation, `fresh` False, and writes
        nothing; so does losing a race for the key. A refusal leaves the key unused.

        Raises IdempotencyKeyReused (the key stands for another request), EngineBusy naming the
        open exclusive operation, UnknownEngine.
        """
        raise NotImplementedError

    async def replay(self, actor: Actor, key: str, fingerprint: str) -> Operation | None:
        """What a key used before stands for; None: not used, or its retention is over.

        Raises IdempotencyKeyReused.
        """
        raise NotImplementedError

    async def get(self, operation_id: str) -> Operation | None:
        raise NotImplementedError

    async def page(
        self, wanted: OperationFilter, before: int | None = None, size: int = 50
    ) -> Page[Operation]:
        """Newest first, in order of acceptance; `next` is a number for `before`."""
        raise NotImplementedError

    async def record(
        self,
        before: Operation,
        advanced: Advanced,
        *,
        lease: Lease | None = None,
        audit: AuditEntry | None = None,
    ) -> Operation:
        """Write one step: the operation as `advanced` has it, its event if there is one, and the
        audit entry, in one transaction. Gives `advanced.operation`.

        Raises Superseded when the stored operation is not at the state, sequence and engine
        sequence of `before`, or when the lease has gone to another holder or was released;
        EngineBusy when a queued operation would run beside another exclusive one.
        """
        raise NotImplementedError

    async def open_ones(self, engine_id: str | None = None) -> tuple[Operation, ...]:
        """All that have not ended, oldest first."""
        raise NotImplementedError
