"""Freeze windows, one for each engine at most. One whose time is over counts as none."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BindParameter, ColumnElement, bindparam, delete, select

from app.clock import Clock
from app.domain.errors import UnknownEngine
from app.domain.freezes import Freeze, refusal_of
from app.ledger import audit as auditing
from app.ledger.database import Database, Statements, Write
from app.ledger.rows import freeze_of, freeze_values
from app.ledger.tables import engines, freezes
from app.ledger.values import AuditEntry


class Freezes:
    """Once one is put, nothing is accepted or dispatched against it any more: both lock the row
    of the engine's registration that this locks for itself."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def put(self, engine_id: str, freeze: Freeze, audit: AuditEntry) -> None:
        """In the place of an earlier one. Raises UnknownEngine."""
        values = freeze_values(freeze)

        async def work(write: Write) -> None:
            await _lock(write, engine_id)
            put = (
                write.upsert(freezes)
                .values(engine_id=engine_id, **values)
                .on_conflict_do_update(index_elements=[freezes.c.engine_id], set_=values)
            )
            await write.connection.execute(put)
            await auditing.write_entry(write, audit)

        await self._database.write(work)

    async def lift(self, engine_id: str, audit: AuditEntry) -> bool:
        """Whether one was in force. Raises UnknownEngine."""
        now = self._clock.now()

        async def work(write: Write) -> bool:
            await _lock(write, engine_id)
            held = await in_force(write.connection, engine_id, now)
            lift = delete(freezes).where(freezes.c.engine_id == engine_id)
            await write.connection.execute(lift)
            await auditing.write_entry(write, audit)
            return held is not None

        return await self._database.write(work)


def holds(now: datetime | BindParameter[datetime]) -> ColumnElement[bool]:
    return freezes.c.until > now


COLUMNS = tuple(
    freezes.c[name].label(f"freeze_{name}")
    for name in ("reason", "until", "since", "issuer", "subject", "client_id")
)


_IN_FORCE = select(*COLUMNS).where(
    freezes.c.engine_id == bindparam("engine"), holds(bindparam("now"))
)


async def in_force(connection: Statements, engine_id: str, now: datetime) -> Freeze | None:
    row = (await connection.execute(_IN_FORCE, {"engine": engine_id, "now": now})).one_or_none()
    return None if row is None else freeze_of(row)


async def require_thawed(write: Write, engine_id: str, now: datetime) -> None:
    """Raises EngineFrozen. The caller has locked the engine's registration, for sharing at least;
    until its commit no freeze comes in between."""
    freeze = await in_force(write.connection, engine_id, now)
    if freeze is not None:
        raise refusal_of(freeze, now)


async def _lock(write: Write, engine_id: str) -> None:
    query = (
        select(engines.c.id)
        .where(engines.c.id == engine_id, engines.c.removed_at.is_(None))
        .with_for_update()
    )
    if (await write.connection.execute(query)).one_or_none() is None:
        raise UnknownEngine("there is no such engine")
