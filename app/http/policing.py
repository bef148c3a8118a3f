"""Following the policy file while the gateway runs."""

from __future__ import annotations

import asyncio
from typing import Any

from app.auth.policy.live import LivePolicy
from app.domain.errors import ChadburnError
from app.http.rooms import Rooms
from app.ledger.values import AuditEntry
from app.observability.log import logger

LOOK_S = 2.0
_FAULTS_AT_MOST = 10
_log = logger("chadburn.policy")


async def follow_policy(
    policy: LivePolicy, rooms: Rooms, *, gateway: str, look_s: float = LOOK_S
) -> None:
    """For ever. A file that is refused is logged, counted and shown by readiness; what was in force
    stays so. The audit has what each start has found, and every change: `gateway` says whose."""
    if policy.policy is not None:
        await _write_down(policy, rooms, gateway)
    while True:
        await asyncio.sleep(look_s)
        outcome = await asyncio.to_thread(policy.look)
        if outcome == "unchanged":
            continue
        rooms.metrics.policy_read(outcome, in_force=policy.ok)
        if outcome == "refused":
            _log.error("policy_refused", faults=[str(fault) for fault in policy.faults])
        else:
            _log.warning("policy_loaded")
            rooms.tail.wake()  # streams look at once at what their callers may still see
        await _write_down(policy, rooms, gateway)


async def _write_down(policy: LivePolicy, rooms: Rooms, gateway: str) -> None:
    """Never raises: the policy is in force, or refused, all the same."""
    detail: dict[str, Any] = {"gateway": gateway, "sha256": policy.sha256}
    if not policy.ok:
        detail["faults"] = [str(fault) for fault in policy.faults[:_FAULTS_AT_MOST]]
    entry = AuditEntry(
        at=rooms.clock.now(),
        action="load_policy",
        outcome="accepted" if policy.ok else "refused",
        reason=None if policy.ok else "POLICY_REFUSED",
        detail=detail,
    )
    try:
        await rooms.ledger.audit.append(entry)
    except ChadburnError as failure:
        _log.error("audit_not_written", exc_info=failure, outcome=entry.outcome)
