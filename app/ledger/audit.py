"""The book of who asked for what."""

from __future__ import annotations

from app.ledger.values import AuditEntry, AuditFilter, Page, StoredAudit


class Audit:
    async def append(self, entry: AuditEntry) -> None:
        """One entry in a transaction of its own, for what is not written with an operation."""
        raise NotImplementedError

    async def page(
        self, wanted: AuditFilter, before: int | None = None, size: int = 50
    ) -> Page[StoredAudit]:
        """Newest first; `next` is a number for `before`."""
        raise NotImplementedError
