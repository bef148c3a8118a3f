"""Who does, for all processes on this ledger, what only one of them at a time may do."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import Update, or_, update

from app.clock import Clock
from app.ledger.database import Database, Write
from app.ledger.tables import duties
from app.ledger.values import Duty

_NOBODY = ""
LONGEST_S = 2 * 3600.0
"""Nobody takes a duty for so long. Who has one until later took it by a clock that has been set
back since, and may be no more; were that waited for, nobody would do it all that time."""


class Duties:
    """As the leases of engines: expiry goes by the processes' clocks, and a fence never comes
    twice. So whatever the clocks say there is one at most who can act under the newest fence."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def take(self, name: str, owner: str, ttl_s: float) -> Duty | None:
        """Have it from now on, if nobody has it or its time is up. None: somebody has it, be it
        the same `owner`."""
        if not owner or ttl_s > LONGEST_S:
            raise ValueError("a duty has an owner, and not for so long")
        now, until = _span(self._clock, ttl_s)

        async def work(write: Write) -> Duty | None:
            taken = (
                write.upsert(duties)
                .values(name=name, owner=owner, fence=1, expires_at=until)
                .on_conflict_do_update(
                    index_elements=[duties.c.name],
                    set_={"owner": owner, "fence": duties.c.fence + 1, "expires_at": until},
                    where=or_(
                        duties.c.owner == _NOBODY,
                        duties.c.expires_at <= now,
                        duties.c.expires_at > now + timedelta(seconds=LONGEST_S),
                    ),
                )
                .returning(duties.c.fence)
            )
            fence = (await write.connection.execute(taken)).scalar_one_or_none()
            return None if fence is None else Duty(name, owner, fence, until)

        return await self._database.write(work)

    async def keep(self, duty: Duty, ttl_s: float) -> Duty | None:
        """Until now + `ttl_s`. None: it has gone to somebody else."""
        return await self._database.write(lambda write: kept(write, duty, self._clock, ttl_s))

    async def give_back(self, duty: Duty) -> None:
        """Nothing happens if it has gone to somebody else."""

        async def work(write: Write) -> None:
            free = {"owner": _NOBODY, "expires_at": self._clock.now()}
            await write.connection.execute(_of(duty).values(**free))

        await self._database.write(work)

    async def end_all(self) -> None:
        """Only for a process that knows that no other one is alive."""

        async def work(write: Write) -> None:
            free = {"owner": _NOBODY, "expires_at": self._clock.now()}
            await write.connection.execute(update(duties).values(**free))

        await self._database.write(work)


async def kept(write: Write, duty: Duty, clock: Clock, ttl_s: float) -> Duty | None:
    """The duty with more time, which nobody can take before the commit; None: somebody has."""
    _, until = _span(clock, ttl_s)
    held = await write.connection.execute(_of(duty).values(expires_at=until))
    return Duty(duty.name, duty.owner, duty.fence, until) if held.rowcount else None


def _of(duty: Duty) -> Update:
    return update(duties).where(
        duties.c.name == duty.name, duties.c.owner == duty.owner, duties.c.fence == duty.fence
    )


def _span(clock: Clock, ttl_s: float) -> tuple[datetime, datetime]:
    now = clock.now()
    return now, now + timedelta(seconds=ttl_s)
