"""Time and ids, passed in through constructors so that tests can decide both."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol
from uuid import UUID

IdSource = Callable[[], str]
"""Gives a new id at each call: `uuid7`, or an instance of `Uuid7`."""

_SUBMILLISECOND_BITS = 12
_RANDOM_BITS = 62


def rfc3339(moment: datetime) -> str:
    """Aware; spelled in UTC with `Z`, as all documents of the API spell it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


class Clock(Protocol):
    def now(self) -> datetime:
        """The present moment, timezone-aware, UTC."""


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)


def uuid7() -> str:
    """A UUID version 7 (RFC 9562 section 5.7) of this moment, in its usual spelling.

    The 12 bits behind the milliseconds are the fraction of the millisecond (section 6.2, method
    3), so ids sort as the system clock runs, to a quarter of a microsecond. A clock set back
    sorts them back: nothing may rely on the order of ids but their readers' convenience. Where
    ids have to rise, use `Uuid7`.
    """
    return _uuid7(_ticks(time.time_ns()), secrets.randbits(_RANDOM_BITS))


class Uuid7:
    """A source of version 7 ids that rise strictly, whatever the clock does.

    Not for use from several threads at once.
    """

    def __init__(
        self,
        time_ns: Callable[[], int] = time.time_ns,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self._time_ns = time_ns
        self._randbits = randbits
        self._last = 0

    def __call__(self) -> str:
        # A clock that stands still or goes back is overtaken one tick at a time.
        self._last = max(self._last + 1, _ticks(self._time_ns()))
        return _uuid7(self._last, self._randbits(_RANDOM_BITS))


def _ticks(unix_ns: int) -> int:
    """Milliseconds since 1970 with 12 binary digits of fraction."""
    return (unix_ns << _SUBMILLISECOND_BITS) // 1_000_000


def _uuid7(ticks: int, random: int) -> str:
    milliseconds, fraction = ticks >> _SUBMILLISECOND_BITS, ticks & 0xFFF
    version, variant = 0x7, 0b10
    value = (
        (milliseconds & 0xFFFF_FFFF_FFFF) << 80
        | version << 76
        | fraction << 64
        | variant << _RANDOM_BITS
        | random
    )
    return str(UUID(int=value))
