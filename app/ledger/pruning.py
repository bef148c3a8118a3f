"""Taking out what is not kept for ever, a small portion at a time.

**An operation is whole or gone.** It goes with all its events in one transaction, and only once it
has ended, has been over for its age, and no idempotency key names it any more. What is open is
never touched, however old.

`ledger.pruned_to` is the highest position that an event that is gone had. From a cursor behind it
everything is still there; from an older one something may be missing, so whoever comes with it is
told to begin anew. That holds for the order of all events. An operation's own events are all there
as long as it is, whatever `pruned_to` says; hence one that runs for months keeps its whole story,
and does not keep others from being pruned.

Only what lies at or below the settled horizon is taken: so nothing can become visible at or below
`pruned_to` any more, and it may serve as the horizon where no later event is left.

**The audit** goes by whole seals, so that what is left can be verified; see `sealing`.

Portions are bounded in rows, since on SQLite other writers wait for each. An operation with more
events than that goes by itself. Processes that prune at once take turns, one portion each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, exists, func, literal, select, text, tuple_, update

from app.clock import Clock
from app.ledger import keys, positions
from app.ledger.column_types import BIG, UtcTime
from app.ledger.database import Database, Write
from app.ledger.schema import looking
from app.ledger.tables import (
    audit,
    audit_seals,
    events,
    idempotency_keys,
    is_ended,
    ledger,
    operations,
    payloads,
    stages,
)

OPERATIONS_AT_ONCE = 100
EVENTS_AT_ONCE = 1_000
ROWS_AT_ONCE = 1_000
"""Of keys, and of the audit."""
SEALS_AT_ONCE = 50

PAUSE_S = 0.05
"""Between two portions, so that writers on SQLite are held up by one at most, and a database that
others use too has most of its time for them."""

# The same family of locks as the one around upgrades, and the next number.
_TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(1128414562, 2)")


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """What ended, or was written down, at that moment or earlier is not kept. UTC."""

    operations: datetime
    audit: datetime


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many of each."""

    operations: int = 0
    events: int = 0
    keys: int = 0
    audit: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(
            self.operations + other.operations,
            self.events + other.events,
            self.keys + other.keys,
            self.audit + other.audit,
        )

    def __bool__(self) -> bool:
        return self != Pruned()


@dataclass(frozen=True, slots=True)
class Place:
    """Among the ended operations, in the order of their ends."""

    ended_at: datetime
    ordinal: int


@dataclass(frozen=True, slots=True)
class Portion:
    """`place`: where the next one begins. `more`: there may be a next one."""

    pruned: Pruned
    more: bool
    place: Place | None = None


class Pruning:
    """Each portion is a transaction. None instead of one: another process is at it just now."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def keys(self) -> Portion | None:
        """Keys whose retention is over and whose operation has ended."""

        async def work(write: Write) -> Portion | None:
            if not await _alone(write):
                return None
            gone = await keys.forget_expired(write, self._clock.now(), ROWS_AT_ONCE)
            return Portion(Pruned(keys=gone), more=gone >= ROWS_AT_ONCE)

        return await self._database.write(work)

    async def operations(self, until: datetime, behind: Place | None) -> Portion | None:
        """Those that had ended by `until`, in the order of their ends, behind a place."""
        return await self._database.write(lambda write: _prune_operations(write, until, behind))

    async def audit(self, until: datetime) -> Portion | None:
        """Entries in their order and by whole seals, up to the first that has one younger than
        `until`. What is not sealed yet stays."""
        now = self._clock.now()
        return await self._database.write(lambda write: _prune_audit(write, until, now))


@dataclass(frozen=True, slots=True)
class Run:
    """`elsewhere`: not all of it, since another process was pruning."""

    pruned: Pruned
    elsewhere: bool = False


_Next = Callable[[Pruning, Portion | None], Awaitable[Portion | None]]


async def prune(
    pruning: Pruning, cutoffs: Cutoffs, *, pause_s: float = PAUSE_S, tries: int = 1
) -> Run:
    """All that is over its age, in small portions with pauses between them.

    Keys first: what they named may then go. `tries`: how often another process that has its turn
    is waited for; then the rest is left to it.
    """
    run = Run(Pruned())
    for next_portion in _portions(cutoffs):
        portion: Portion | None = None
        busy = 0
        while True:
            given = await next_portion(pruning, portion)
            if given is None:
                busy += 1
                if busy >= tries:
                    return replace(run, elsewhere=True)
            else:
                busy, portion = 0, given
                run = replace(run, pruned=run.pruned + portion.pruned)
                if not portion.more:
                    break
            await asyncio.sleep(pause_s)
    return run


def _portions(cutoffs: Cutoffs) -> tuple[_Next, ...]:
    """For each kind, how the portion behind another one is taken."""
    return (
        lambda pruning, _last: pruning.keys(),
        lambda pruning, last: pruning.operations(cutoffs.operations, last and last.place),
        lambda pruning, _last: pruning.audit(cutoffs.audit),
    )


async def preview(url: str, now: datetime, cutoffs: Cutoffs) -> Pruned:
    """What would go now. Changes nothing and takes no lock, so that a gateway may run meanwhile.

    Raises SchemaBehind, SchemaAhead, LedgerUnavailable.
    """
    over = idempotency_keys.c.expires_at <= now
    key_of = idempotency_keys.c.operation_id == operations.c.id
    gone = select(func.count(), func.coalesce(func.sum(operations.c.sequence), 0)).where(
        is_ended,
        operations.c.ended_at <= cutoffs.operations,
        ~exists().where(key_of, ~over),
    )
    expired = (
        select(func.count())
        .select_from(idempotency_keys.join(operations, key_of))
        .where(over, is_ended)
    )
    younger = select(func.min(audit.c.id)).where(audit.c.at > cutoffs.audit).scalar_subquery()
    whole = select(func.max(audit_seals.c.to_id)).where(
        audit_seals.c.to_id < func.coalesce(younger, literal(2**63 - 1, BIG))
    )
    entries = select(func.count()).where(audit.c.id <= func.coalesce(whole.scalar_subquery(), 0))
    async with looking(url) as (connection, _):
        count, of_events = (await connection.execute(gone)).one()
        return Pruned(
            count,
            int(of_events),
            (await connection.execute(expired)).scalar_one(),
            (await connection.execute(entries)).scalar_one(),
        )


async def _alone(write: Write) -> bool:
    """Until the commit no other process prunes. On SQLite there is none."""
    return not write.postgres or bool((await write.connection.execute(_TRY_LOCK)).scalar_one())


async def _prune_operations(write: Write, until: datetime, behind: Place | None) -> Portion | None:
    if not await _alone(write):
        return None
    settled = await positions.settled(write.connection, write.postgres)
    last = select(events.c.position).where(
        events.c.operation_id == operations.c.id, events.c.sequence == operations.c.sequence
    )
    key = exists().where(idempotency_keys.c.operation_id == operations.c.id)
    # SQLite would rather find by their state all that have ended, and then sort them.
    over = is_ended if write.postgres else func.likely(is_ended)
    # What a key holds is looked at and passed over, so that the portion stays small however many
    # of them there are.
    candidates = (
        select(
            operations.c.ordinal,
            operations.c.id,
            operations.c.ended_at,
            operations.c.sequence,
            func.coalesce(last.scalar_subquery(), 0).label("last"),
            key.label("held"),
        )
        .where(over, operations.c.ended_at <= until)
        .order_by(operations.c.ended_at, operations.c.ordinal)
        .limit(OPERATIONS_AT_ONCE)
    )
    if behind is not None:
        place = tuple_(literal(behind.ended_at, UtcTime), literal(behind.ordinal, BIG))
        candidates = candidates.where(tuple_(operations.c.ended_at, operations.c.ordinal) > place)
    rows = (await write.connection.execute(candidates)).all()
    seen = _within_bounds(rows)
    chosen = [row for row in seen if not row.held and row.last <= settled]
    gone = await _delete(write, [row.id for row in chosen])
    if chosen:
        highest = max(row.last for row in chosen)
        moved = update(ledger).where(ledger.c.pruned_to < highest).values(pruned_to=highest)
        await write.connection.execute(moved)
    return Portion(
        Pruned(operations=len(chosen), events=gone),
        more=len(seen) < len(rows) or len(rows) == OPERATIONS_AT_ONCE,
        place=Place(seen[-1].ended_at, seen[-1].ordinal) if seen else behind,
    )


def _within_bounds(rows: Any) -> list[Row[Any]]:
    """As many from the first on as have few enough events together, and one at least."""
    taken: list[Row[Any]] = []
    of_events = 0
    for row in rows:
        of_events += row.sequence
        if taken and of_events > EVENTS_AT_ONCE:
            break
        taken.append(row)
    return taken


async def _delete(write: Write, ids: list[str]) -> int:
    """The operations with all that belongs to them; how many events that were."""
    if not ids:
        return 0
    # Payloads and further calls went when the operation ended; a ledger that was mended by hand
    # may have some.
    for table in (payloads, stages):
        await write.connection.execute(delete(table).where(table.c.operation_id.in_(ids)))
    gone = await write.connection.execute(delete(events).where(events.c.operation_id.in_(ids)))
    await write.connection.execute(delete(operations).where(operations.c.id.in_(ids)))
    return gone.rowcount


async def _prune_audit(write: Write, until: datetime, now: datetime) -> Portion | None:
    """The last of the seals whose rows have gone stays: the next one follows from its digest."""
    if not await _alone(write):
        return None
    # From the beginning on and without holes, whatever the clocks of several gateways said.
    query = (
        select(audit_seals.c.number, audit_seals.c.from_id, audit_seals.c.to_id)
        .add_columns(audit_seals.c.row_count)
        # Along the key: at most the first of them is pruned.
        .where(audit_seals.c.number > 0, audit_seals.c.pruned_at.is_(None))
        .order_by(audit_seals.c.number)
        .limit(SEALS_AT_ONCE)
    )
    seals = (await write.connection.execute(query)).all()
    gone: list[Row[Any]] = []
    for seal in seals:
        if gone and sum(one.row_count for one in gone) + seal.row_count > ROWS_AT_ONCE:
            break
        within = audit.c.id.between(seal.from_id, seal.to_id)
        youngest = select(func.max(audit.c.at)).where(within)
        at = (await write.connection.execute(youngest)).scalar_one()
        if at is not None and at > until:
            return await _prune_sealed(write, gone, now, more=False)
        gone.append(seal)
    more = len(gone) < len(seals) or len(seals) == SEALS_AT_ONCE
    return await _prune_sealed(write, gone, now, more=more)


async def _prune_sealed(
    write: Write, seals: list[Row[Any]], now: datetime, *, more: bool
) -> Portion:
    if not seals:
        return Portion(Pruned(), more=False)
    first, last = seals[0], seals[-1]
    rows = delete(audit).where(audit.c.id.between(first.from_id, last.to_id))
    count = (await write.connection.execute(rows)).rowcount
    anchor = update(audit_seals).where(audit_seals.c.number == last.number)
    await write.connection.execute(anchor.values(pruned_at=now, marks=""))
    await write.connection.execute(delete(audit_seals).where(audit_seals.c.number < last.number))
    return Portion(Pruned(audit=count), more=more)
