"""Carries accepted orders out, and sees each of them to its end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from app.clock import Clock
from app.domain.operation import Operation
from app.ledger.ledger import Ledger
from app.operations.fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how long, in seconds. Nothing here decides an outcome."""

    lease_ttl_s: float = 15.0
    sweep_s: float = 1.0  # looking for open operations that nobody drives
    read_timeout_s: float = 3.0
    find_timeout_s: float = 3.0
    cancel_timeout_s: float = 5.0
    after_end_s: float = 1.0  # reading the engine again before its end is told
    retry_first_s: float = 0.1  # the first pause between attempts; then doubled, with jitter
    retry_most_s: float = 10.0


class Runner:
    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        clock: Clock,
        *,
        owner: str,
        pace: Pace = Pace(),  # noqa: B008
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`owner` names this process in leases: a new one at each start."""

    async def start(self) -> None:
        """Take up every open operation of the ledger. What was not sent is sent, or fails if its
        deadline is over; of what was sent the engine is asked. Returns at once."""

    def take(self, operation: Operation) -> None:
        """Drive it from now on. Called right after the commit that accepted or changed it; an
        operation that this call is lost for is found by the next sweep."""

    async def stop(self, grace_s: float) -> None:
        """Let go: nothing is cancelled at an engine, and the next start settles what is open.
        Waits at most `grace_s` for writes under way. May be called twice."""
