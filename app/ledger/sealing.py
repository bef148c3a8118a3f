"""Sealing the audit: rows become part of a chain in which none can be changed unseen.

One process at a time has the duty, and makes each seal under its fence, in one transaction. A seal
has to cover every row that there will ever be up to its last. On SQLite one writer follows another,
so ids become visible in their order. On PostgreSQL a row may become visible long after one with a
higher id; therefore, as for the order of events (`positions`), but without asking anything of the
writers, which may be of an older release or no program of ours at all:
  1. read the last id H that the sequence has given out,
  2. then see who holds the lock on the table that every INSERT takes before it takes an id,
  3. wait until each of these has ended,
  4. then, by a later snapshot, read the rows up to H.
The writer of an id <= H took its lock before step 1. In step 2 it still has it, and is waited for;
or it has ended, and since PostgreSQL lets go of locks only after a transaction has become visible,
step 4 sees what it committed. Nobody waits for the sealer: it only looks.

A seal ends at a row that is there, not at H: an id that was not committed may be given out again
after a crash of the database.

What this is not: a proof against somebody who may write to the database and makes the whole chain
anew. For that a digest has to be kept elsewhere; each one is in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, cast

from sqlalchemy import select, text

from app.clock import Clock
from app.ledger.database import Database, Statements, Write
from app.ledger.duties import Duties, kept
from app.ledger.seals import COLUMNS, FORM, GENESIS, sealed
from app.ledger.tables import audit, audit_seals
from app.ledger.values import Duty, Seal

log = logging.getLogger(__name__)

DUTY = "seal the audit"
ROWS_AT_ONCE = 250
"""On SQLite others who write wait as long as one seal takes: some ten milliseconds."""
_LOOK_S = 0.05
_FAR = 2**63 - 1

_LAST_TAKEN = text("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM audit_id_seq")
_WRITERS = text("""
SELECT DISTINCT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = 'audit'::regclass AND mode = 'RowExclusiveLock'
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")


class DutyLost(Exception):
    """Somebody else seals now; nothing was written."""


class Sealing:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def seal(
        self, duty: Duty, ttl_s: float, *, patience_s: float = 5.0
    ) -> tuple[Seal | None, Duty]:
        """Seal the next rows, up to `ROWS_AT_ONCE`, and keep the duty for `ttl_s` more. None:
        there are none, or somebody who has written some does not end within `patience_s`.

        Raises DutyLost.
        """
        horizon = await self._horizon(patience_s)

        async def work(write: Write) -> tuple[Seal | None, Duty]:
            held = await kept(write, duty, self._clock, ttl_s)
            if held is None:
                raise DutyLost
            return await self._next(write.connection, held, horizon), held

        return await self._database.write(work)

    async def head(self) -> Seal | None:
        """The last one."""
        return await self._database.read(head_of)

    async def _horizon(self, patience_s: float) -> int:
        """No row can become visible any more at or below this id; 0: that is not known."""
        if not self._database.postgres:
            return _FAR
        ends_at = asyncio.get_running_loop().time() + patience_s
        last, writing = await self._database.read(_taken_and_writers)
        while writing:
            if asyncio.get_running_loop().time() >= ends_at:
                log.warning("the audit is not sealed: who has written to it does not end")
                return 0
            await asyncio.sleep(_LOOK_S)
            writing &= await self._database.read(_writers)
        return last

    async def _next(self, connection: Statements, duty: Duty, horizon: int) -> Seal | None:
        before = await head_of(connection)
        begin = 1 if before is None else before.to_id + 1
        rows = await rows_of(connection, begin, horizon, ROWS_AT_ONCE)
        if not rows:
            return None
        seal = Seal(
            number=1 if before is None else before.number + 1,
            from_id=begin,
            to_id=rows[-1]["id"],
            row_count=len(rows),
            form=FORM,
            previous=GENESIS if before is None else before.digest,
            digest="",
            sealed_at=self._clock.now(),
            fence=duty.fence,
        )
        seal = sealed(seal, rows)
        await connection.execute(audit_seals.insert().values(values_of(seal)))
        return seal


async def seal_all(duties: Duties, sealing: Sealing, owner: str, ttl_s: float = 60.0) -> None:
    """All there is now; nothing where another process has the duty."""
    duty = await duties.take(DUTY, owner, ttl_s)
    if duty is None:
        return
    try:
        seal: Seal | None
        while True:
            seal, duty = await sealing.seal(duty, ttl_s)
            if seal is None or seal.row_count < ROWS_AT_ONCE:
                return
    finally:
        await duties.give_back(duty)


async def _taken_and_writers(connection: Statements) -> tuple[int, set[str]]:
    last = int((await connection.execute(_LAST_TAKEN)).scalar_one())
    return last, await _writers(connection)


async def _writers(connection: Statements) -> set[str]:
    return set((await connection.execute(_WRITERS)).scalars())


async def head_of(connection: Statements) -> Seal | None:
    last = select(audit_seals).order_by(audit_seals.c.number.desc()).limit(1)
    row = (await connection.execute(last)).one_or_none()
    return None if row is None else seal_of(row._mapping)


async def rows_of(
    connection: Statements, first: int, last: int, most: int
) -> list[Mapping[str, Any]]:
    """Rows of the audit with ids from `first` to `last`, in their order."""
    columns = [audit.c[name] for name in COLUMNS]
    query = select(*columns).where(audit.c.id >= first, audit.c.id <= last)
    found = await connection.execute(query.order_by(audit.c.id).limit(most))
    return [cast("Mapping[str, Any]", row) for row in found.mappings()]


def seal_of(row: Mapping[Any, Any]) -> Seal:
    return Seal(**{column.name: row[column.name] for column in audit_seals.columns})


def values_of(seal: Seal) -> dict[str, Any]:
    return {column.name: getattr(seal, column.name) for column in audit_seals.columns}
