"""Moments in queries."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:  # by its offset it lies before the year 1, or behind the year 9999
        raise ValueError("this moment is in no calendar") from None


Since = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""RFC 3339 with an offset; the same moment in UTC."""
