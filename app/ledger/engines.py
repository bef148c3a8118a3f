"""The register of engines, and the last reading of each."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Select,
    and_,
    bindparam,
    func,
    select,
    update,
)

from app.clock import Clock
from app.domain.engine import Engine, HealthState, Observed, Registration
from app.domain.errors import EngineHasOpenOperation, GenerationMismatch, UnknownEngine
from app.domain.kinds import EngineRole
from app.domain.selectors import Labels
from app.ledger import audit as auditing
from app.ledger import freezes as freezing
from app.ledger.constraints import violations
from app.ledger.database import Database, Statements, Write
from app.ledger.paging import page_of
from app.ledger.readings import Readings
from app.ledger.rows import engine_of, registration_of, registration_values
from app.ledger.schema import looking
from app.ledger.sights import has_label, within
from app.ledger.tables import engines, freezes, holds_slot, is_open, observations, operations
from app.ledger.values import AuditEntry, EngineFilter, Page, Watched


def _all_at(now: datetime | BindParameter[datetime]) -> Select[Any]:
    """Every engine as it stands, with the freeze that holds at that moment."""
    frozen = and_(freezes.c.engine_id == engines.c.id, freezing.holds(now))
    return (
        select(
            engines,
            observations.c.health,
            observations.c.observed_at,
            observations.c.document,
            operations.c.id.label("running_operation"),
            *freezing.COLUMNS,
        )
        .outerjoin(observations, observations.c.engine_id == engines.c.id)
        .outerjoin(operations, and_(operations.c.engine_id == engines.c.id, holds_slot))
        .outerjoin(freezes, frozen)
        .where(engines.c.removed_at.is_(None))
    )


# Made once: to build and to compare such a statement costs SQLAlchemy more than to run it.
_ONE = _all_at(bindparam("now")).where(engines.c.id == bindparam("engine"))
_WATCHED = (
    select(
        engines.c.id,
        engines.c.generation,
        observations.c.observed_at,
        operations.c.id.is_not(None).label("busy"),
    )
    .outerjoin(observations, observations.c.engine_id == engines.c.id)
    .outerjoin(operations, and_(operations.c.engine_id == engines.c.id, holds_slot))
    .where(engines.c.removed_at.is_(None))
    .order_by(engines.c.id)
)


async def registrations(url: str) -> tuple[Registration, ...]:
    """All that are registered, read beside whoever has the ledger.

    Raises SchemaBehind, SchemaAhead, LedgerUnavailable.
    """
    query = select(engines).where(engines.c.removed_at.is_(None)).order_by(engines.c.id)
    async with looking(url) as (connection, _):
        return tuple(registration_of(row) for row in await connection.execute(query))


class Engines:
    """Ids are never used again for another engine: a removed one stays in the register, unseen."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._readings = Readings(database)
        self._clock = clock

    async def register(
        self,
        registration: Registration,
        audit: AuditEntry,
        *,
        back_from: tuple[str, str] | None = None,
    ) -> Engine:
        """Raises EngineExists, also for the id of a removed engine, unless that had the label
        `back_from` (name and value) to its end: then it is that engine, back with its history, and
        its generation is the next."""
        values = registration_values(registration) | {
            "id": registration.id,
            "generation": registration.generation,
            "created_at": registration.created_at,
        }

        async def work(write: Write) -> Engine:
            if back_from is None or not await _put_back(write, registration, back_from):
                with violations():
                    await write.connection.execute(engines.insert().values(values))
            await auditing.write_entry(write, audit)
            return await self._existing(write.connection, registration.id)

        return await self._database.write(work)

    async def get(self, engine_id: str) -> Engine | None:
        """None: never registered, or removed."""

        async def look(connection: Statements) -> Engine | None:
            return await find(connection, engine_id, self._clock.now())

        return await self._database.read(look)

    async def page(
        self, wanted: EngineFilter, after: str | None = None, size: int = 50
    ) -> Page[Engine]:
        """By id ascending, those behind `after`; `next` is the last id of the page."""
        query = _all_at(self._clock.now()).where(*self._matches(wanted)).order_by(engines.c.id)
        if after is not None:
            query = query.where(engines.c.id > after)

        async def look(connection: Statements) -> Page[Engine]:
            rows = (await connection.execute(query.limit(size + 1))).all()
            return page_of(rows, size, engine_of, lambda row: row.id)

        return await self._database.read(look)

    async def labels(self, engine_id: str | None = None) -> dict[str, Labels]:
        """Of that engine, or of all; of removed ones too, whose history stays."""
        query = select(engines.c.id, engines.c.labels)
        if engine_id is not None:
            query = query.where(engines.c.id == engine_id)

        async def look(connection: Statements) -> dict[str, Labels]:
            return {row.id: dict(row.labels) for row in await connection.execute(query)}

        return await self._database.read(look)

    async def change(
        self, registration: Registration, expected_generation: int, audit: AuditEntry
    ) -> Engine:
        """Replace dialect, members, TLS names and labels. The new generation is the expected
        one plus 1, whatever `registration` says; `created_at` stays.

        Raises GenerationMismatch or UnknownEngine.
        """
        values = registration_values(registration) | {"generation": expected_generation + 1}

        async def work(write: Write) -> Engine:
            await _require(write, registration.id, expected_generation)
            change = update(engines).where(engines.c.id == registration.id).values(values)
            await write.connection.execute(change)
            await auditing.write_entry(write, audit)
            return await self._existing(write.connection, registration.id)

        return await self._database.write(work)

    async def remove(self, engine_id: str, expected_generation: int, audit: AuditEntry) -> None:
        """Raises UnknownEngine, GenerationMismatch, or EngineHasOpenOperation naming it."""
        still_open = (
            select(operations.c.id)
            .where(operations.c.engine_id == engine_id, is_open)
            .order_by(operations.c.ordinal)
            .limit(1)
        )

        async def work(write: Write) -> None:
            await _require(write, engine_id, expected_generation)
            open_one = (await write.connection.execute(still_open)).scalar_one_or_none()
            if open_one is not None:
                raise EngineHasOpenOperation(
                    "an operation of this engine has not ended", operation_id=open_one
                )
            removal = update(engines).where(engines.c.id == engine_id)
            await write.connection.execute(removal.values(removed_at=self._clock.now()))
            await auditing.write_entry(write, audit)

        await self._database.write(work)

    async def observe(self, engine_id: str, observed: Observed) -> None:
        """Keep a reading, unless one of a later `observed_at` is kept already; later by minutes
        is no later reading but another clock.

        Raises UnknownEngine for one that was never registered.
        """
        await self._readings.keep(engine_id, observed)

    async def watched(self) -> tuple[Watched, ...]:
        """All that are registered, by id ascending."""

        async def look(connection: Statements) -> tuple[Watched, ...]:
            rows = await connection.execute(_WATCHED)
            return tuple(Watched(row.id, row.generation, row.observed_at, row.busy) for row in rows)

        return await self._database.read(look)

    async def _existing(self, connection: Statements, engine_id: str) -> Engine:
        found = await find(connection, engine_id, self._clock.now())
        assert found is not None
        return found

    def _matches(self, wanted: EngineFilter) -> list[ColumnElement[bool]]:
        postgres = self._database.postgres
        conditions = [
            has_label(name, [value], postgres=postgres) for name, value in wanted.labels.items()
        ]
        if not wanted.sight.unlimited:
            conditions.append(within(wanted.sight, postgres=postgres))
        # An engine that was never read is unknown, not absent.
        if wanted.states:
            health = func.coalesce(observations.c.health, HealthState.UNKNOWN.value)
            conditions.append(health.in_([state.value for state in sorted(wanted.states)]))
        if wanted.roles:
            role = func.coalesce(observations.c.role, EngineRole.UNKNOWN.value)
            conditions.append(role.in_([role.value for role in sorted(wanted.roles)]))
        if wanted.version is not None:
            conditions.append(observations.c.weight_version == wanted.version)
        return conditions


async def find(connection: Statements, engine_id: str, now: datetime) -> Engine | None:
    """None: never registered, or removed."""
    row = (await connection.execute(_ONE, {"engine": engine_id, "now": now})).one_or_none()
    return None if row is None else engine_of(row)


async def _put_back(write: Write, registration: Registration, label: tuple[str, str]) -> bool:
    """Whether there was a removed one to put back. Its dialect is what it was."""
    name, value = label
    query = (
        select(engines.c.generation, engines.c.labels, engines.c.dialect)
        .where(engines.c.id == registration.id, engines.c.removed_at.is_not(None))
        .with_for_update()
    )
    removed = (await write.connection.execute(query)).one_or_none()
    if removed is None or removed.labels.get(name) != value:
        return False
    if removed.dialect != registration.dialect.value:
        return False
    values = registration_values(registration)
    values |= {"generation": removed.generation + 1, "removed_at": None}
    change = update(engines).where(engines.c.id == registration.id).values(values)
    await write.connection.execute(change)
    return True


async def _require(write: Write, engine_id: str, expected_generation: int) -> None:
    """Lock the registration for this writer alone; no order can be accepted until the commit.

    Raises UnknownEngine or GenerationMismatch.
    """
    query = (
        select(engines.c.generation)
        .where(engines.c.id == engine_id, engines.c.removed_at.is_(None))
        .with_for_update()
    )
    generation = (await write.connection.execute(query)).scalar_one_or_none()
    if generation is None:
        raise UnknownEngine("there is no such engine")
    if generation != expected_generation:
        raise GenerationMismatch(
            f"expected generation {expected_generation}, the current generation is {generation}"
        )
