"""Who may drive an engine, and until when."""

from __future__ import annotations

from app.ledger.values import Lease


class Leases:
    """Expiry goes by the gateways' clocks, not the database's. Clocks that differ shorten or
    lengthen a lease; they never make two holders of one fence."""

    async def acquire(self, engine_id: str, owner: str, ttl_s: float) -> Lease | None:
        """Take the lease if it is free, released or expired. None: it is held, also by the same
        `owner`. Raises UnknownEngine."""
        raise NotImplementedError

    async def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        """Until now + `ttl_s`. None: it was released or has gone to another holder. One that has
        expired but that nobody took is renewed."""
        raise NotImplementedError

    async def release(self, lease: Lease) -> None:
        """Give it back. Nothing happens if it has gone to another holder."""
        raise NotImplementedError
