"""What is not kept for ever: ended operations with their events, their keys, and the audit."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import timedelta

from app.clock import Clock
from app.ledger.ledger import Ledger
from app.ledger.pruning import PAUSE_S, Cutoffs, prune

log = logging.getLogger(__name__)

EVERY_S = 3_600.0
PROOFS_EVERY_S = 30.0
SESSIONS_EVERY_S = 300.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long an operation is kept after its end, and an entry of the audit.

    A key goes when its own time is over. An operation stays as long as a key names it.
    """

    operations: timedelta
    audit: timedelta

    def cutoffs(self, clock: Clock) -> Cutoffs:
        now = clock.now()
        return Cutoffs(now - self.operations, now - self.audit)


async def keep_within(
    ledger: Ledger, clock: Clock, retention: Retention, every_s: float = EVERY_S
) -> None:
    """Now and every `every_s`, until cancelled: prune what is over its age."""
    while True:
        try:
            done = await prune(ledger.pruning, retention.cutoffs(clock))
            if done.pruned:
                log.info("pruned what is kept no longer: %s", done.pruned)
        except Exception as failed:
            # Whatever it is, it is tried again.
            log.warning("what is over its age is kept until the next time: %r", failed)
        await asyncio.sleep(every_s)


async def keep_proofs_short(
    ledger: Ledger, *, in_use: bool, every_s: float = PROOFS_EVERY_S
) -> None:
    """Forget proofs that their age alone refuses: once, and where they are `in_use` again every
    `every_s` until cancelled. There is one for each request of a caller who holds a key."""
    while True:
        try:
            more = True
            while more:
                more = await ledger.proofs.forget_expired()
                await asyncio.sleep(PAUSE_S)
        except Exception as failed:
            log.warning("old proofs are kept until the next time: %r", failed)
        if not in_use:
            return
        await asyncio.sleep(every_s)


async def forget_sessions(ledger: Ledger, *, every_s: float = SESSIONS_EVERY_S) -> None:
    """Until cancelled: clear away browser sessions whose time is up, which nobody could use."""
    while True:
        try:
            more = True
            while more:
                more = await ledger.browser_sessions.forget_over()
                await asyncio.sleep(PAUSE_S)
        except Exception as failed:
            log.warning("sessions that are over are kept until the next time: %r", failed)
        await asyncio.sleep(every_s)
