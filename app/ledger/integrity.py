"""Whether what the ledger holds agrees with itself: read through from end to end, changing nothing.

Most of it can't come about through this program, whose invariants stand in the database too. It
comes about by a damaged disk, a backup that was put together from parts, or a hand that mended
something. A gateway may run meanwhile: what belongs together is read by one statement, which sees
one state.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, and_, case, exists, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.clock import Clock
from app.domain.events import EventType
from app.domain.kinds import TERMINAL_STATES, OperationState
from app.ledger import positions
from app.ledger.schema import Standing, looking
from app.ledger.tables import (
    events,
    idempotency_keys,
    is_ended,
    leases,
    operations,
    payloads,
    stages,
)

OPERATIONS_AT_ONCE = 500
MOST_FINDINGS = 100
"""Of each check; a ledger that is broken all over says so often enough."""

_LONGEST_LEASE = timedelta(hours=1)
_STATE_OF = {
    EventType.COMPLETED: OperationState.SUCCEEDED,
    EventType.FAILED: OperationState.FAILED,
    EventType.CANCELLED: OperationState.CANCELLED,
}
"""Of each event that ends an operation, but `settled`, which may state any end."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`check`: which one; `subject`: the operation, engine or place; `message`: what is wrong."""

    check: str
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class Examination:
    """How much was looked at, and what was found wrong: nothing if the ledger is sound."""

    schema: Standing
    operations: int
    events: int
    keys: int
    leases: int
    findings: tuple[Finding, ...]


async def examine(url: str, clock: Clock) -> Examination:
    """Raises SchemaBehind, SchemaAhead, LedgerUnavailable. Takes no lock."""
    async with looking(url) as (connection, schema):
        postgres = connection.dialect.name == "postgresql"
        found: list[Finding] = []
        if not postgres:
            found += await _file(connection)
        of_operations, of_events = 0, 0
        ordinal = 0
        while rows := (await connection.execute(_operations_behind(ordinal))).all():
            ordinal = rows[-1].ordinal
            of_operations += len(rows)
            of_events += sum(row.events for row in rows)
            found += [finding for row in rows for finding in _of_operation(row)]
            await connection.rollback()  # or a reader of SQLite keeps the side file from shrinking
        found += await _belonging(connection)
        found += await _places(connection, postgres)
        found += await _leases(connection, clock.now())
        return Examination(
            schema,
            of_operations,
            of_events,
            await _count(connection, idempotency_keys),
            await _count(connection, leases),
            _first_of_each(found),
        )


async def _file(connection: AsyncConnection) -> list[Finding]:
    """SQLite's own look at its pages and indexes, and at what refers to what."""
    said = await connection.execute(text(f"PRAGMA integrity_check({MOST_FINDINGS})"))
    found = [Finding("file", "the database", str(row[0])) for row in said if row[0] != "ok"]
    broken = await connection.execute(text("PRAGMA foreign_key_check"))
    found += [
        Finding("reference", f"{row[0]} {row[1]}", f"refers to nothing in {row[2]}")
        for row in broken.fetchmany(MOST_FINDINGS)
    ]
    await connection.rollback()
    return found


def _operations_behind(ordinal: int) -> Any:
    """The next operations, each with what its events come to."""
    portion = (
        select(operations.c.ordinal, operations.c.id, operations.c.state, operations.c.sequence)
        .where(operations.c.ordinal > ordinal)
        .order_by(operations.c.ordinal)
        .limit(OPERATIONS_AT_ONCE)
        .cte("o")
    )
    before = func.lag(events.c.position).over(
        partition_by=events.c.operation_id, order_by=events.c.sequence
    )
    own = (
        select(
            events.c.operation_id,
            events.c.sequence,
            events.c.type,
            events.c.terminal,
            case((before >= events.c.position, 1), else_=0).label("backwards"),
        )
        .where(events.c.operation_id.in_(select(portion.c.id)))
        .subquery("e")
    )
    is_last = own.c.sequence == portion.c.sequence
    return (
        select(
            portion,
            func.count(own.c.sequence).label("events"),
            func.min(own.c.sequence).label("lowest"),
            func.max(own.c.sequence).label("highest"),
            func.sum(case((own.c.terminal, 1), else_=0)).label("ends"),
            func.coalesce(func.sum(own.c.backwards), 0).label("backwards"),
            func.max(case((is_last, own.c.type))).label("last_type"),
        )
        .select_from(portion.outerjoin(own, own.c.operation_id == portion.c.id))
        .group_by(portion.c.ordinal, portion.c.id, portion.c.state, portion.c.sequence)
        .order_by(portion.c.ordinal)
    )


def _of_operation(row: Row[Any]) -> list[Finding]:
    wrong: list[str] = []
    numbers = (row.lowest, row.highest, row.events)
    if numbers != (1, row.sequence, row.sequence):
        wrong.append(
            f"its events are not 1 to {row.sequence}: {row.events} of them, "
            f"from {row.lowest} to {row.highest}"
        )
    if row.backwards:
        wrong.append("the places of its events do not rise with their numbers")
    state = OperationState(row.state)
    if row.ends != (1 if state in TERMINAL_STATES else 0):
        wrong.append(f"it is {state} and has {row.ends} events that end it")
    elif not _fits(state, row.last_type):
        wrong.append(f"it is {state} and its last event is {row.last_type}")
    return [Finding("operation", row.id, message) for message in wrong]


def _fits(state: OperationState, last: str | None) -> bool:
    if last is None:
        return True  # a gap, which has been said
    kind = EventType(last)
    if state in TERMINAL_STATES:
        return kind is EventType.SETTLED or _STATE_OF.get(kind) is state
    if state is OperationState.QUEUED:
        # `progress`: a further call of a weight session is taken on before its turn, too.
        return kind in (EventType.QUEUED, EventType.PROGRESS)
    return not kind.terminal


async def _belonging(connection: AsyncConnection) -> list[Finding]:
    """What names an operation that is not there, or not in such a state."""
    known = exists().where(operations.c.id == idempotency_keys.c.operation_id)
    of_event = exists().where(operations.c.id == events.c.operation_id)
    queries = [
        (
            "key",
            "a key stands for it, and it is not there",
            select(idempotency_keys.c.operation_id).where(~known),
        ),
        (
            "event",
            "it has events, and is not there",
            select(events.c.operation_id).where(~of_event).distinct(),
        ),
    ]
    for table, what in ((payloads, "its payload"), (stages, "its further calls")):
        ended = and_(operations.c.id == table.c.operation_id, is_ended)
        queries.append(
            (
                "leftover",
                f"it has ended, and {what} was not deleted",
                select(table.c.operation_id).where(exists().where(ended)).distinct(),
            )
        )
    found = []
    for name, message, query in queries:
        rows = await connection.execute(query.limit(MOST_FINDINGS))
        found += [Finding(name, row[0], message) for row in rows]
    return found


async def _places(connection: AsyncConnection, postgres: bool) -> list[Finding]:
    highest = (await connection.execute(select(func.max(events.c.position)))).scalar_one() or 0
    pruned_to = await positions.pruned_to(connection)
    last = await positions.last_taken(connection, postgres)
    if max(highest, pruned_to) <= last:
        return []
    # Whoever restores rows without the sequence finds new events behind cursors.
    message = f"places up to {max(highest, pruned_to)} are taken, and the next one is {last + 1}"
    return [Finding("positions", "the order of events", message)]


async def _leases(connection: AsyncConnection, now: datetime) -> list[Finding]:
    strange = select(leases.c.engine_id).where(
        leases.c.owner != "", leases.c.expires_at > now + _LONGEST_LEASE
    )
    return [
        Finding(
            "lease",
            row.engine_id,
            "it is held for longer than any gateway holds one: a clock is far off",
        )
        for row in await connection.execute(strange.limit(MOST_FINDINGS))
    ]


async def _count(connection: AsyncConnection, table: Any) -> int:
    found: int = (await connection.execute(select(func.count()).select_from(table))).scalar_one()
    return found


def _first_of_each(found: list[Finding]) -> tuple[Finding, ...]:
    kept: list[Finding] = []
    seen: dict[str, int] = {}
    for finding in found:
        seen[finding.check] = seen.get(finding.check, 0) + 1
        if seen[finding.check] <= MOST_FINDINGS:
            kept.append(finding)
    return tuple(kept)
