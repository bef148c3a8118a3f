"""Following the policy file while the gateway runs."""

from __future__ import annotations

import asyncio

from app.auth.policy.live import LivePolicy
from app.http.rooms import Rooms
from app.observability.log import logger

LOOK_S = 2.0
_log = logger("chadburn.policy")


async def follow_policy(policy: LivePolicy, rooms: Rooms, *, look_s: float = LOOK_S) -> None:
    """For ever. A file that is refused is logged, counted and shown by readiness; what was in force
    stays so."""
    while True:
        await asyncio.sleep(look_s)
        outcome = await asyncio.to_thread(policy.look)
        if outcome == "unchanged":
            continue
        rooms.metrics.policy_read(outcome, in_force=policy.ok)
        if outcome == "refused":
            _log.error("policy_refused", faults=[str(fault) for fault in policy.faults])
            continue
        _log.warning("policy_loaded")
        rooms.tail.wake()  # streams look at once at what their callers may still see
