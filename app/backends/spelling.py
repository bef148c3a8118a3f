"""Words of the wire in the domain's spelling: enums by name, text made safe to keep."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

E = TypeVar("E", bound=StrEnum)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_TEXT = 1_000
_REASON = re.compile(r"[A-Z][A-Z0-9_]{1,62}")


class Malformed(ValueError):
    """The engine said something that can't be what it means to say."""


def word(wire: Any, number: int) -> str | None:
    """`PAUSE_MODE_DRAIN` of `PauseMode` to `drain`; None for UNSPECIFIED and for a number that a
    newer engine may have and this schema has not."""
    if number == 0 or number not in wire.values():
        return None
    name: str = wire.Name(number)
    # Every value of an enum begins with the enum's name; the UNSPECIFIED one shows how long it is.
    prefix = wire.Name(0).removesuffix("UNSPECIFIED")
    return name.removeprefix(prefix).lower()


def words(wire: Any, numbers: Iterable[int]) -> tuple[str, ...]:
    """Those that are known, in their order."""
    return tuple(said for number in numbers if (said := word(wire, number)) is not None)


def value_of(wire: Any, number: int, domain: type[E]) -> E | None:
    said = word(wire, number)
    try:
        return None if said is None else domain(said)
    except ValueError:
        return None


def values_of(wire: Any, numbers: Iterable[int], domain: type[E]) -> tuple[E, ...]:
    found = (value_of(wire, number, domain) for number in numbers)
    return tuple(value for value in found if value is not None)


def number_of(wire: Any, value: StrEnum) -> Any:
    """The other way. ValueError: the wire has no such value."""
    return wire.Value(wire.Name(0).removesuffix("UNSPECIFIED") + value.name)


def text_of(said: str, longest: int = _MAX_TEXT) -> str:
    """Without control characters (a database refuses NUL, a terminal obeys escapes), bounded."""
    clean = "".join(letter if letter.isprintable() else " " for letter in said[: longest + 1])
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def reason_of(said: str) -> str | None:
    """A reason that programs can rely on, UPPER_SNAKE; None for anything else."""
    return said if _REASON.fullmatch(said) else None


def time_of(unix_nanos: int) -> datetime | None:
    """UTC; None for 0, and for what no calendar holds."""
    if unix_nanos <= 0:
        return None
    try:
        return _EPOCH + timedelta(microseconds=unix_nanos // 1_000)
    except OverflowError:
        return None


def count_of(number: int) -> int:
    """Counts are unsigned 64 bit on the wire and signed 64 bit in databases. Raises Malformed."""
    if number >= 2**63:
        raise Malformed("a count beyond 2^63")
    return number
