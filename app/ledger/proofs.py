"""Which proofs of possession have been shown, for as long as they could be shown again."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, select

from app.clock import Clock
from app.ledger.database import Database, Write
from app.ledger.tables import proofs

_AT_ONCE = 5_000


class Proofs:
    """A proof counts once over all gateways on the same ledger: the row's key decides between two
    that come at the same moment."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def first_use(self, digest: str, until: datetime) -> bool:
        """Whether this is the first time that the proof is shown; it is kept up to `until`.

        Raises LedgerUnavailable: then it was shown to nobody, or it counts as shown.
        """

        async def work(write: Write) -> bool:
            return await claim_proof(write, digest, until)

        return await self._database.write(work)

    async def forget_expired(self) -> bool:
        """Delete a portion of those that are refused by their age alone. True: there are more."""
        now = self._clock.now()

        async def work(write: Write) -> bool:
            old = (
                select(proofs.c.digest)
                .where(proofs.c.expires_at <= now)
                .order_by(proofs.c.expires_at)
                .limit(_AT_ONCE)
                # What another gateway is deleting at this moment is gone without us.
                .with_for_update(skip_locked=True)
            )
            gone = delete(proofs).where(proofs.c.digest.in_(old))
            return (await write.connection.execute(gone)).rowcount >= _AT_ONCE

        return await self._database.write(work)


async def claim_proof(write: Write, digest: str, until: datetime) -> bool:
    """Whether this is its first time; then it counts together with the rest of the transaction."""
    claim = (
        write.upsert(proofs)
        .values(digest=digest, expires_at=until)
        .on_conflict_do_nothing(index_elements=[proofs.c.digest])
        .returning(proofs.c.digest)
    )
    return (await write.connection.execute(claim)).scalar_one_or_none() is not None
