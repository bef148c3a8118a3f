"""Moments in queries and bodies."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field
from pydantic_core import PydanticCustomError

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:  # by its offset it lies before the year 1, or behind the year 9999
        raise ValueError("this moment is in no calendar") from None


def _spelled(value: object) -> object:
    if not isinstance(value, str) or not _RFC3339.fullmatch(value):
        raise PydanticCustomError("form", "A moment is written as 2026-03-01T12:00:00Z.")
    return value


Since = Annotated[AwareDatetime, BeforeValidator(_spelled), AfterValidator(_in_utc)]
"""RFC 3339 with an offset, by the letter: no bare date, and no number of seconds. The same moment
in UTC."""

Moment = Annotated[Since, Field(strict=False)]
"""The same in a body."""
