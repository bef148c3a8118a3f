"""What goes with an order and is no part of it: kept until its operation ends, and never shown."""

from __future__ import annotations

from sqlalchemy import bindparam, delete, select

from app.ledger.database import Database, Statements, Write
from app.ledger.tables import payloads

_OF_OPERATION = payloads.c.operation_id == bindparam("operation")
_CONTENT = select(payloads.c.content).where(_OF_OPERATION)
_FORGET = delete(payloads).where(_OF_OPERATION)


class Payloads:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, operation_id: str) -> bytes | None:
        """For whoever sends the order. None: it has none, or it has ended."""

        async def look(connection: Statements) -> bytes | None:
            found = await connection.execute(_CONTENT, {"operation": operation_id})
            content: bytes | None = found.scalar_one_or_none()
            return None if content is None else bytes(content)

        return await self._database.read(look)


async def keep(write: Write, operation_id: str, content: bytes) -> None:
    row = {"operation_id": operation_id, "content": content}
    await write.connection.execute(payloads.insert().values(row))


async def forget(write: Write, operation_id: str) -> None:
    await write.connection.execute(_FORGET, {"operation": operation_id})
