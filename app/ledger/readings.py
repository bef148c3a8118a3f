"""Readings of engines on their way into the ledger.

A fleet is read all the time, and an order must not stand in line behind that. So what comes while
one transaction runs goes together into the next: one turn of the writer, whatever their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import bindparam, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from app.domain.engine import Observed
from app.domain.errors import ChadburnError, UnknownEngine
from app.ledger.database import Database, Write
from app.ledger.rows import observed_values
from app.ledger.tables import engines, observations

_MOST = 200
_SLOWEST = timedelta(minutes=2)
_COLUMNS = ("health", "observed_at", "role", "weight_version", "document")


@dataclass(frozen=True, slots=True)
class _Waiting:
    engine_id: str
    observed: Observed
    kept: asyncio.Future[None]


class Readings:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def keep(self, engine_id: str, observed: Observed) -> None:
        """Returns when it is committed, or an older one than what is kept. Raises UnknownEngine for
        one that was never registered."""
        self._database.check_open()
        loop = asyncio.get_running_loop()
        kept: asyncio.Future[None] = loop.create_future()
        self._waiting.append(_Waiting(engine_id, observed, kept))
        if self._writing is None or self._writing.done():
            # Of nobody's request: it writes for whoever comes.
            self._writing = loop.create_task(self._write_all(), context=Context())
        await kept

    async def _write_all(self) -> None:
        while self._waiting:
            several, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            try:
                await self._write(several)
            except ChadburnError as error:
                _fail(several, error)
            except Exception as error:
                if len(several) == 1:
                    _fail(several, error)
                    continue
                # One that the database does not take must not cost the others theirs.
                for each in several:
                    try:
                        await self._write([each])
                    except Exception as its_own:
                        _fail([each], its_own)

    async def _write(self, several: Sequence[_Waiting]) -> None:
        # Of two gateways each holds rows that the other one wants: in one order nobody waits twice.
        in_order = sorted(several, key=lambda each: each.engine_id)
        ids = sorted({each.engine_id for each in several})

        async def work(write: Write) -> frozenset[str]:
            found = await write.connection.execute(_REGISTERED, {"ids": ids})
            known = frozenset(row.id for row in found)
            # Here and not before: for two hundred it takes long enough to hold up the event loop.
            rows = [_values(each) for each in in_order if each.engine_id in known]
            if rows:
                await write.connection.execute(_KEEP[write.postgres], rows)
            return known

        known = await self._database.write(work)
        for each in several:
            if each.kept.done():
                continue  # nobody waits any more
            if each.engine_id in known:
                each.kept.set_result(None)
            else:
                each.kept.set_exception(UnknownEngine("there is no such engine"))


def _fail(several: Sequence[_Waiting], error: Exception) -> None:
    for each in several:
        if not each.kept.done():
            each.kept.set_exception(error)


def _values(each: _Waiting) -> dict[str, object]:
    at = each.observed.observed_at
    return {
        "engine_id": each.engine_id,
        **observed_values(each.observed),
        "far_ahead": None if at is None else at + _SLOWEST,
    }


def _keep(insert: postgresql.Insert | sqlite.Insert) -> postgresql.Insert | sqlite.Insert:
    """Not over a newer one: a slow observer must not put an old state back. But one from further
    ahead than any observer is slow was made before the clock was set back, and nothing would
    replace it until the clock has come that far again."""
    at = observations.c.observed_at
    far_ahead = bindparam("far_ahead", type_=at.type)
    insert = insert.values({name: bindparam(name) for name in ("engine_id", *_COLUMNS)})
    return insert.on_conflict_do_update(
        index_elements=[observations.c.engine_id],
        set_={name: insert.excluded[name] for name in _COLUMNS},
        where=or_(at.is_(None), at <= insert.excluded["observed_at"], at > far_ahead),
    )


_REGISTERED = select(engines.c.id).where(engines.c.id.in_(bindparam("ids", expanding=True)))
_KEEP = {
    False: _keep(sqlite.insert(observations)),
    True: _keep(postgresql.insert(observations)),
}
