"""Who may drive an engine, and until when."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, bindparam, or_, select, update

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
            known = select(engines.c.id).where(
                engines.c.id == engine_id, engines.c.removed_at.is_(None)
            )
            if (await write.connection.execute(known)).one_or_none() is None:
                raise UnknownEngine("there is no such engine")
            # One statement, so that of several that find it expired one takes it. The row stays
            # for ever, and with it the fence, which therefore never goes back.
            take = (
                write.upsert(leases)
                .values(engine_id=engine_id, owner=owner, fence=1, expires_at=until)
                .on_conflict_do_update(
                    index_elements=[leases.c.engine_id],
                    set_={"owner": owner, "fence": leases.c.fence + 1, "expires_at": until},
                    # One that was given back is free whatever the clock of the giver said.
                    where=or_(leases.c.owner == _NOBODY, leases.c.expires_at <= now),
                )
                .returning(leases.c.fence)
            )
            fence = (await write.connection.execute(take)).scalar_one_or_none()
            return None if fence is None else Lease(engine_id, owner, fence, until)

        return await self._database.write(work)

    async def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        """Until now + `ttl_s`. None: it was released or has gone to another holder. One that has
        expired but that nobody took is renewed."""
        _, until = self._span(ttl_s)
        prolong = update(leases).where(*_is(lease)).values(expires_at=until)

        async def work(write: Write) -> Lease | None:
            held = (await write.connection.execute(prolong)).rowcount
            return Lease(lease.engine_id, lease.owner, lease.fence, until) if held else None

        return await self._database.write(work)

    async def release(self, lease: Lease) -> None:
        """Give it back. Nothing happens if it has gone to another holder."""
        drop = update(leases).where(*_is(lease))
        drop = drop.values(owner=_NOBODY, expires_at=self._clock.now())

        async def work(write: Write) -> None:
            await write.connection.execute(drop)

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


def _is(lease: Lease) -> tuple[ColumnElement[bool], ...]:
    return (
        leases.c.engine_id == lease.engine_id,
        leases.c.owner == lease.owner,
        leases.c.fence == lease.fence,
    )


_HOLD = (
    select(leases.c.fence)
    .where(*(leases.c[name] == bindparam(name) for name in ("engine_id", "owner", "fence")))
    .with_for_update(read=True)
)


async def hold(write: Write, lease: Lease) -> bool:
    """Whether the lease is still that holder's. Until the commit nobody can take it over.

    Its time may be up: as long as nobody else took it, no other holder has acted.
    """
    its = {"engine_id": lease.engine_id, "owner": lease.owner, "fence": lease.fence}
    return (await write.connection.execute(_HOLD, its)).one_or_none() is not None
