"""Further calls of an operation that several calls order: kept until it ends, never served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from app.clock import Clock
from app.domain.idempotency import replay_of
from app.domain.operation import Operation
from app.domain.transitions import Advanced
from app.domain.weight_sessions import Chunk, Stage, stage_document, stage_of
from app.ledger import audit as auditing
from app.ledger import keys
from app.ledger.constraints import violations
from app.ledger.database import Database, Statements, Write
from app.ledger.documents import json_object
from app.ledger.operations import existing, write_step
from app.ledger.tables import stages
from app.ledger.values import Accepted, AuditEntry, KeyClaim


@dataclass(frozen=True, slots=True)
class StoredStage:
    """`number` counts the calls after the first: 1, 2, 3 …"""

    number: int
    stage: Stage
    expected_revision: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What an operation's further calls were so far. `closed`: one of them lets none follow."""

    calls: int
    chunks: int

    @property
    def closed(self) -> bool:
        return self.calls > self.chunks


class Stages:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def taken(self, operation_id: str) -> Taken:
        """Of an open operation; one that has ended has none left."""
        query = select(
            func.count(),
            func.count().filter(stages.c.name == Chunk.name),
        ).where(stages.c.operation_id == operation_id)

        async def look(connection: Statements) -> Taken:
            row: Any = (await connection.execute(query)).one()
            return Taken(row[0], row[1])

        return await self._database.read(look)

    async def after(self, operation_id: str, number: int, limit: int) -> tuple[StoredStage, ...]:
        query = (
            select(stages)
            .where(stages.c.operation_id == operation_id, stages.c.number > number)
            .order_by(stages.c.number)
            .limit(limit)
        )

        async def look(connection: Statements) -> tuple[StoredStage, ...]:
            rows = await connection.execute(query)
            return tuple(
                StoredStage(row.number, stage_of(row.document), row.expected_revision)
                for row in rows
            )

        return await self._database.read(look)

    async def take(
        self,
        before: Operation,
        advanced: Advanced,
        stage: StoredStage,
        *,
        key: KeyClaim,
        audit: AuditEntry,
    ) -> Accepted:
        """Take on a further call: the step of the operation with its event, the call, its key and
        the audit entry, in one transaction. A key used before for the same call gives the
        operation, `fresh` False, and writes nothing.

        Raises IdempotencyKeyReused; Superseded when the operation is not as `before` any more.
        """
        return await self._database.write(
            lambda write: self._take(write, before, advanced, stage, key, audit)
        )

    async def _take(
        self,
        write: Write,
        before: Operation,
        advanced: Advanced,
        stage: StoredStage,
        key: KeyClaim,
        audit: AuditEntry,
    ) -> Accepted:
        now = self._clock.now()
        seen = await keys.known(write.connection, before.actor, key.key, now)
        earlier = replay_of(seen, key.fingerprint)
        if earlier is not None:
            return Accepted(await existing(write.connection, earlier), fresh=False)
        with violations():
            await keys.claim(write, before.actor, key, before.id, now)
            await write_step(write, before, advanced)
            await write.connection.execute(
                stages.insert().values(
                    operation_id=before.id,
                    number=stage.number,
                    name=stage.stage.name,
                    document=json_object(stage_document(stage.stage)),
                    expected_revision=stage.expected_revision,
                )
            )
        await auditing.write_entry(write, audit)
        return Accepted(advanced.operation, fresh=True)
