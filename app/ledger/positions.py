"""The one order of all events, taken by many writers at once.

On SQLite one writer follows another, so positions become visible in the order they were taken.

On PostgreSQL a number from a sequence may become visible long after a higher one. Therefore a
writer, before it takes any, reads the last number L that the sequence has given out and takes a
shared advisory lock that spells L, in one statement; the lock falls when its transaction ends. A
reader
  1. reads the sequence's last number H,
  2. then reads the lowest L among the locks of such writers,
  3. then, by a later snapshot, reads the events up to min(H, L).
Any position P <= H was taken before step 1, and its writer had locked some L < P before that. In
step 2 either the lock is still there, and cuts the reading below P; or the writer has ended, and
since PostgreSQL lets go of locks only after a transaction has become visible, step 3 sees whatever
it committed. So nothing can appear later at or below what was read. What is rolled back leaves a
gap.

Shared locks never wait for each other: there is no queue of writers. The locks of a database are
told apart from those of other databases in the same server by `pg_locks.database`.
"""

from __future__ import annotations

from sqlalchemy import bindparam, func, select, text

from app.domain.events import EventType
from app.domain.kinds import OperationKind
from app.domain.operation import OperationEvent
from app.ledger.database import Statements, Write
from app.ledger.rows import event_values
from app.ledger.tables import MAX_POSITION, events, ledger

# An advisory key is one signed bigint: 15 bits that say "a writer of this ledger", then 48 bits
# of position; the sequence itself ends before they overflow.
_FAMILY = 0x4342
_KEY_OF_FAMILY = _FAMILY << 48

_LAST = "CASE WHEN is_called THEN last_value ELSE 0 END"
_SEQUENCE = "events_position_seq"

LAST_TAKEN = f"SELECT {_LAST} FROM {_SEQUENCE}"  # noqa: S608 (constants of this module)
"""Step 1."""

OLDEST_WRITER = f"""
SELECT min((classid::bigint << 32 | objid::bigint) & {MAX_POSITION})
FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 1 AND classid::bigint >> 16 = {_FAMILY}
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""  # noqa: S608 (constants of this module)
"""Step 2; NULL where nobody writes."""

_ENTER = text(
    f"SELECT pg_advisory_xact_lock_shared({_KEY_OF_FAMILY} + {_LAST}) FROM {_SEQUENCE}"  # noqa: S608
)
_LAST_TAKEN = text(LAST_TAKEN)
_NEWEST = select(func.max(events.c.position))
_NEWEST_UP_TO = _NEWEST.where(events.c.position <= bindparam("highest"))
_PRUNED_TO = select(ledger.c.pruned_to)
_OLDEST_WRITER = text(OLDEST_WRITER)
_APPEND = events.insert().returning(events.c.position)
_LAST_ON_SQLITE = text("SELECT seq FROM sqlite_sequence WHERE name = 'events'")


async def append(write: Write, event: OperationEvent, kind: OperationKind) -> int:
    """Give the event the next position. The caller holds the lock on its operation's row, so
    that positions rise with the sequence of each operation.

    Call it late in the transaction: from here to the commit, readers stop behind this place.
    """
    if write.postgres and not write.placed:
        await write.connection.execute(_ENTER)
    write.placed = True
    values = event_values(event, kind, terminal=EventType(event.type).terminal)
    return int((await write.connection.execute(_APPEND, values)).scalar_one())


async def settled(connection: Statements, postgres: bool) -> int:
    """The highest position at or below which nothing can become visible any more.

    It is always the position of a committed event, be it a pruned one: only those are sure to
    survive a crash of the database, after which numbers that were not committed may be given out
    again.
    """
    if postgres:
        last = (await connection.execute(_LAST_TAKEN)).scalar_one()
        oldest = (await connection.execute(_OLDEST_WRITER)).scalar_one()
        highest = {"highest": last if oldest is None else min(last, oldest)}
        found = (await connection.execute(_NEWEST_UP_TO, highest)).scalar_one()
    else:
        found = (await connection.execute(_NEWEST)).scalar_one()
    return max(int(found or 0), await pruned_to(connection))


async def last_taken(connection: Statements, postgres: bool) -> int:
    """The highest position that was ever given out, committed or not."""
    statement = _LAST_TAKEN if postgres else _LAST_ON_SQLITE
    return (await connection.execute(statement)).scalar() or 0


async def pruned_to(connection: Statements) -> int:
    return int((await connection.execute(_PRUNED_TO)).scalar_one())
