"""Who may drive an engine, and until when."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import bindparam, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import ReturningInsert

from app.clock import Clock
from app.domain.errors import UnknownEngine
from app.ledger.database import Database, Write
from app.ledger.tables import engines, leases
from app.ledger.values import Lease

_NOBODY = ""


class Leases:
    """Expiry goes by the gateways' clocks, not the database's. Clocks that differ shorten or
    lengthen a lease; they never make two holders of one fence."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def acquire(self, engine_id: str, owner: str, ttl_s: float) -> Lease | None:
        """Take the lease if it is free, released or expired. None: it is held, also by the same
        `owner`. Raises UnknownEngine."""
        if not owner:
            raise ValueError("a lease has an owner")
        now, until = self._span(ttl_s)

        async def work(write: Write) -> Lease | None:
            known = await write.connection.execute(_REGISTERED, {"engine": engine_id})
            before = known.one_or_none()
            if before is None:
                raise UnknownEngine("there is no such engine")
            taken = {"engine_id": engine_id, "owner": owner, "expires_at": until, "now": now}
            take = await write.connection.execute(_TAKE[write.postgres], taken)
            fence = take.scalar_one_or_none()
            return None if fence is None else Lease(engine_id, owner, fence, until, before[0] or "")

        return await self._database.write(work)

    async def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        """Until now + `ttl_s`. None: it was released or has gone to another holder. One that has
        expired but that nobody took is renewed."""
        _, until = self._span(ttl_s)
        change = _its(lease) | {"owner": lease.owner, "expires_at": until}

        async def work(write: Write) -> Lease | None:
            held = (await write.connection.execute(_CHANGE, change)).rowcount
            return Lease(lease.engine_id, lease.owner, lease.fence, until) if held else None

        return await self._database.write(work)

    async def release(self, lease: Lease) -> None:
        """Give it back. Nothing happens if it has gone to another holder."""
        change = _its(lease) | {"owner": _NOBODY, "expires_at": self._clock.now()}

        async def work(write: Write) -> None:
            await write.connection.execute(_CHANGE, change)

        await self._database.write(work)

    async def end_all(self) -> None:
        """End every lease. Only for a process that knows that no other one is alive."""
        end = update(leases).values(owner=_NOBODY, expires_at=self._clock.now())

        async def work(write: Write) -> None:
            await write.connection.execute(end)

        await self._database.write(work)

    def _span(self, ttl_s: float) -> tuple[datetime, datetime]:
        now = self._clock.now()
        return now, now + timedelta(seconds=ttl_s)


def _take(insert: postgresql.Insert | sqlite.Insert) -> ReturningInsert[int]:
    """One statement, so that of several that find it expired one takes it. The row stays for
    ever, and with it the fence, which therefore never goes back."""
    owner, expires_at = insert.excluded["owner"], insert.excluded["expires_at"]
    now = bindparam("now", type_=leases.c.expires_at.type)
    names = ("engine_id", "owner", "expires_at")
    return (
        insert.values(fence=1, **{name: bindparam(name) for name in names})
        .on_conflict_do_update(
            index_elements=[leases.c.engine_id],
            set_={"owner": owner, "fence": leases.c.fence + 1, "expires_at": expires_at},
            # One that was given back is free whatever the clock of the giver said.
            where=or_(leases.c.owner == _NOBODY, leases.c.expires_at <= now),
        )
        .returning(leases.c.fence)
    )


# Made once: to build and to compare a statement costs SQLAlchemy more than to run it.
_REGISTERED = (
    select(leases.c.owner)
    .select_from(engines.outerjoin(leases, leases.c.engine_id == engines.c.id))
    .where(engines.c.id == bindparam("engine"), engines.c.removed_at.is_(None))
)
_TAKE = {False: _take(sqlite.insert(leases)), True: _take(postgresql.insert(leases))}
_ITS = tuple(leases.c[name] == bindparam(f"its_{name}") for name in ("engine_id", "owner", "fence"))
_CHANGE = update(leases).where(*_ITS)
_HOLD = select(leases.c.fence).where(*_ITS).with_for_update(read=True)


def _its(lease: Lease) -> dict[str, Any]:
    return {
        "its_engine_id": lease.engine_id,
        "its_owner": lease.owner,
        "its_fence": lease.fence,
    }


async def hold(write: Write, lease: Lease) -> bool:
    """Whether the lease is still that holder's. Until the commit nobody can take it over.

    Its time may be up: as long as nobody else took it, no other holder has acted.
    """
    return (await write.connection.execute(_HOLD, _its(lease))).one_or_none() is not None
