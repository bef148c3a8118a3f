"""What goes with an order and is no part of it: kept until its operation ends, and never shown."""

from __future__ import annotations

from sqlalchemy import delete, select

from app.ledger.database import Database, Statements, Write
from app.ledger.tables import payloads


class Payloads:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, operation_id: str) -> bytes | None:
        """For whoever sends the order. None: it has none, or it has ended."""
        query = select(payloads.c.content).where(payloads.c.operation_id == operation_id)

        async def look(connection: Statements) -> bytes | None:
            content: bytes | None = (await connection.execute(query)).scalar_one_or_none()
            return None if content is None else bytes(content)

        return await self._database.read(look)


async def keep(write: Write, operation_id: str, content: bytes) -> None:
    row = {"operation_id": operation_id, "content": content}
    await write.connection.execute(payloads.insert().values(row))


async def forget(write: Write, operation_id: str) -> None:
    gone = delete(payloads).where(payloads.c.operation_id == operation_id)
    await write.connection.execute(gone)
