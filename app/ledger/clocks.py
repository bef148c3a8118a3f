"""Whether this process and the database agree on the time.

Leases and deadlines go by the clocks of the gateways. Where these are far apart nothing is done
twice, but orders end unsent that had time enough, and nobody would know why.
"""

from __future__ import annotations

import logging

from sqlalchemy import func, select

from app.clock import Clock
from app.ledger.database import Statements

log = logging.getLogger(__name__)

_NEAR_S = 2.0


class ClockComparison:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._apart = False

    async def look(self, connection: Statements) -> None:
        """Says so in the log each time that they have parted. On SQLite there is one clock."""
        if connection.dialect.name != "postgresql":
            return
        before = self._clock.now()
        theirs = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
        after = self._clock.now()
        ahead_s = (before - theirs).total_seconds()
        behind_s = (theirs - after).total_seconds()
        apart = max(ahead_s, behind_s) > _NEAR_S
        if apart and not self._apart:
            log.warning(
                "this machine's clock is %.0f s %s the database's: leases and deadlines go wrong "
                "where gateways disagree on the time",
                max(ahead_s, behind_s),
                "ahead of" if ahead_s > 0 else "behind",
            )
        self._apart = apart
