"""The ledger as one object: opened at start, closed at the end."""

from __future__ import annotations

from app.clock import Clock
from app.ledger.audit import Audit
from app.ledger.engines import Engines
from app.ledger.events import Events
from app.ledger.leases import Leases
from app.ledger.operations import Operations


class Ledger:
    """All writes are transactions of their own, and a caller that is cancelled does not cut one
    short: it is carried out to its end, only nobody waits for it.

    Every method may raise LedgerUnavailable.
    """

    identity: str
    """8 hex digits, made with the schema: which ledger a stream's cursor belongs to."""
    engines: Engines
    operations: Operations
    events: Events
    audit: Audit
    leases: Leases

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        clock: Clock,
        migrate: bool = False,
        pool_size: int = 10,
        poll_interval_s: float = 1.0,
    ) -> Ledger:
        """Open `sqlite+aiosqlite:///path` or `postgresql+psycopg://…`.

        `sqlite:///` and `postgresql://` mean the same drivers. `migrate`: bring the schema to
        this release first. `poll_interval_s`: how often subscriptions look for events that
        nobody announced. On SQLite this process becomes the only one that has the file, so all
        leases of earlier processes end here.

        Raises LedgerInUse, SchemaBehind, SchemaAhead, UpgradeBusy, LedgerUnavailable;
        InvalidArgument for another kind of URL.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Let running writes end, then give everything back. May be called twice."""
        raise NotImplementedError

    async def check(self) -> None:
        """Raises LedgerUnavailable, SchemaBehind or SchemaAhead: not ready."""
        raise NotImplementedError

    def pool_in_use(self) -> int:
        """How many pooled connections are out at this moment."""
        raise NotImplementedError
