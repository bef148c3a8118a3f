"""What is not kept for ever."""

from __future__ import annotations

import asyncio
import logging

from app.ledger.ledger import Ledger

log = logging.getLogger(__name__)

EVERY_S = 3_600.0
_AT_ONCE = 1_000


async def forget_expired_keys(ledger: Ledger, every_s: float = EVERY_S) -> None:
    """Now and every `every_s`, until cancelled: delete the idempotency keys whose retention is
    over. In small portions, because on SQLite other writers wait for each of them."""
    while True:
        try:
            forgotten = _AT_ONCE
            while forgotten == _AT_ONCE:
                forgotten = await ledger.operations.forget_expired_keys(_AT_ONCE)
        except Exception as failed:
            # Whatever it is, it is tried again.
            log.warning("expired keys are kept until the next time: %r", failed)
        await asyncio.sleep(every_s)
