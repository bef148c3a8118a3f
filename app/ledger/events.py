"""Reading the events in their order, and waiting for more."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sqlalchemy import ColumnElement, bindparam, select

from app.ledger import positions
from app.ledger.database import Database, Statements
from app.ledger.errors import HistoryPruned
from app.ledger.rows import event_of
from app.ledger.sights import ids_within
from app.ledger.tables import events
from app.ledger.values import EventFilter, StoredEvent
from app.ledger.wakes import Subscription, Wakes

# Made once: to build and to compare a statement costs SQLAlchemy more than to run it.
_OF_OPERATION = (
    select(events)
    .where(events.c.operation_id == bindparam("operation"), events.c.sequence > bindparam("after"))
    .order_by(events.c.sequence)
    .limit(bindparam("most"))
)
_BETWEEN = (
    select(events)
    .where(events.c.position > bindparam("after"), events.c.position <= bindparam("up_to"))
    .order_by(events.c.position)
    .limit(bindparam("most"))
)


class Events:
    """Positions rise in an order that agrees with each operation's sequence, and nothing ever
    becomes visible behind a position that was delivered. They have gaps."""

    def __init__(self, database: Database, wakes: Wakes) -> None:
        self._database = database
        self._wakes = wakes

    async def of_operation(
        self, operation_id: str, after_sequence: int = 0, limit: int = 500
    ) -> tuple[StoredEvent, ...]:
        """In order of sequence. An unknown operation has none. May be ahead of the horizon: the
        events of one operation commit in their order, whatever other writers do."""
        its = {"operation": operation_id, "after": after_sequence, "most": limit}

        async def look(connection: Statements) -> tuple[StoredEvent, ...]:
            return tuple(event_of(row) for row in await connection.execute(_OF_OPERATION, its))

        return await self._database.read(look)

    async def after(
        self, position: int, wanted: EventFilter, limit: int = 500
    ) -> tuple[tuple[StoredEvent, ...], int]:
        """The matching events behind `position`, in order, and the horizon: the position up to
        which everything that matches has been given. Go on from the horizon, not from the last
        event. The horizon is never below `position`.

        Raises HistoryPruned where some of them are no longer there. Not for one operation alone:
        its events go all at once, with it, and its sequence tells whether they are whole.
        """

        async def look(connection: Statements) -> tuple[tuple[StoredEvent, ...], int]:
            horizon = await positions.settled(connection, self._database.postgres)
            conditions = _matches(wanted, self._database.postgres)
            query = _BETWEEN.where(*conditions) if conditions else _BETWEEN
            between = {"after": position, "up_to": horizon, "most": limit}
            found = tuple(event_of(row) for row in await connection.execute(query, between))
            # Looked at last, since pruning may go on in between.
            if wanted.operation_id is None and position < await positions.pruned_to(connection):
                raise HistoryPruned("these events are no longer kept")
            reached = found[-1].position if len(found) == limit else horizon
            return found, max(reached, position)

        return await self._database.read(look)

    async def horizon(self) -> int:
        """The position up to which everything is settled; what comes later lies behind it.

        It may be lower than a moment before; that takes nothing back.
        """

        async def look(connection: Statements) -> int:
            return await positions.settled(connection, self._database.postgres)

        return await self._database.read(look)

    async def oldest(self) -> int:
        """The oldest cursor among all events that can still be resumed: up to and including this
        position events may have been pruned. `after(p)` misses nothing if and only if p >=
        oldest(). An operation that is there has all its events, older ones too."""
        return await self._database.read(positions.pruned_to)

    async def given_out(self, position: int) -> bool:
        """Whether `position` can be a cursor of this ledger, still resumable or not.

        False for one from the future: of another ledger, or from before a backup was restored.
        """

        async def look(connection: Statements) -> bool:
            newest = await positions.last_taken(connection, self._database.postgres)
            return 0 <= position <= newest

        return await self._database.read(look)

    def subscribe(self) -> AbstractContextManager[Subscription]:
        """Subscribe first, then read what is there, then wait: nothing falls between."""
        return self._wakes.subscribe()


def _matches(wanted: EventFilter, postgres: bool) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.engine_ids is not None:
        conditions.append(events.c.engine_id.in_(sorted(wanted.engine_ids)))
    if not wanted.sight.unlimited:
        conditions.append(events.c.engine_id.in_(ids_within(wanted.sight, postgres=postgres)))
    if wanted.operation_id is not None:
        conditions.append(events.c.operation_id == wanted.operation_id)
    if wanted.kinds:
        conditions.append(events.c.kind.in_([kind.value for kind in sorted(wanted.kinds)]))
    if wanted.types:
        conditions.append(events.c.type.in_([kind.value for kind in sorted(wanted.types)]))
    return conditions
