"""The book of who asked for what."""

from __future__ import annotations

from app.ledger.database import Database, Statements, Write
from app.ledger.listing import page_of_audit
from app.ledger.paging import page_of
from app.ledger.rows import audit_of, audit_values
from app.ledger.sights import seen_ids
from app.ledger.tables import audit
from app.ledger.values import AuditEntry, AuditFilter, Page, StoredAudit

_ENTER = audit.insert()


class Audit:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, entry: AuditEntry) -> None:
        """One entry in a transaction of its own, for what is not written with an operation."""

        async def work(write: Write) -> None:
            await write_entry(write, entry)

        await self._database.write(work)

    async def page(
        self, wanted: AuditFilter, before: int | None = None, size: int = 50
    ) -> Page[StoredAudit]:
        """Newest first; `next` is a number for `before`."""
        postgres = self._database.postgres

        async def look(connection: Statements) -> Page[StoredAudit]:
            seen = await seen_ids(connection, wanted.sight, wanted.engine_id, postgres=postgres)
            if seen == ():
                return Page((), None)
            query = page_of_audit(wanted, before, size, seen)
            rows = (await connection.execute(query)).all()
            return page_of(rows, size, audit_of, lambda row: row.id)

        return await self._database.read(look)


async def write_entry(write: Write, entry: AuditEntry) -> None:
    await write.connection.execute(_ENTER, audit_values(entry))
