"""Freeze windows: for a time an engine takes no new orders."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from app.domain.errors import EngineFrozen, FieldFault, InvalidArgument
from app.domain.operation import Actor

LONGEST = timedelta(days=31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """From `since` until `until` (UTC), in the words of who ordered it."""

    reason: str
    until: datetime
    by: Actor
    since: datetime


def check_window(until: datetime, now: datetime) -> None:
    """Raises InvalidArgument for an end that has passed or lies further ahead than `LONGEST`."""
    if until <= now:
        raise _fault("a freeze ends in the future")
    if until - now > LONGEST:
        raise _fault(f"a freeze lasts {LONGEST.days} days at most")


def refusal_of(freeze: Freeze, now: datetime) -> EngineFrozen:
    """What an order is told that comes at `now`."""
    until = freeze.until.astimezone(UTC).isoformat().replace("+00:00", "Z")
    left_s = (freeze.until - now).total_seconds()
    return EngineFrozen(
        f"the engine is frozen until {until}: {freeze.reason}", retry_after_s=int(left_s) + 1
    )


def _fault(detail: str) -> InvalidArgument:
    return InvalidArgument(detail, faults=(FieldFault("/until", detail),))
