"""Counts of calls without a valid token, and of refusals beyond what a caller may cause, folded so
that a flood of them is not a flood of rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from app.domain.operation import Actor

_OTHERS = "other"


@dataclass(frozen=True, slots=True)
class RefusedCalls:
    """How many calls one address made within one minute. `reasons`: how often each. `caller`:
    whose, if it was known."""

    minute: datetime
    source: str
    reasons: dict[str, int]
    caller: Actor | None = None


class RefusedCallers:
    """Folds refusals by address and minute. Not for use from several threads.

    At most `most_addresses`, each with its callers, are told apart in a minute; what comes from
    further ones is counted under `other`, so that who forges addresses cannot make this grow.
    """

    def __init__(self, *, most_addresses: int = 1000) -> None:
        self._most = most_addresses
        self._counts: dict[tuple[datetime, str, Actor | None], Counter[str]] = {}

    def count(self, at: datetime, source: str, reason: str, caller: Actor | None = None) -> None:
        key = (at.replace(second=0, microsecond=0), source, caller)
        if key not in self._counts and len(self._counts) >= self._most:
            key = (key[0], _OTHERS, None)
        self._counts.setdefault(key, Counter())[reason] += 1

    def take(self, now: datetime | None) -> tuple[RefusedCalls, ...]:
        """Hand over the minutes that are over at `now`, oldest first; None: all of them."""
        this_minute = None if now is None else now.replace(second=0, microsecond=0)
        over = [key for key in self._counts if this_minute is None or key[0] < this_minute]
        return tuple(
            RefusedCalls(minute, source, dict(self._counts.pop((minute, source, caller))), caller)
            for minute, source, caller in sorted(over, key=lambda key: (key[:2], str(key[2])))
        )
