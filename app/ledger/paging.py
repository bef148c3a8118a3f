"""Pages by key: a page goes on behind the last row of the one before, whatever was added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Row

from app.ledger.values import Page

T = TypeVar("T")


def page_of(
    rows: Sequence[Row[Any]],
    size: int,
    value_of: Callable[[Row[Any]], T],
    key_of: Callable[[Row[Any]], int | str],
) -> Page[T]:
    """`rows` are up to `size` + 1; the one too many only says that there is more."""
    if size < 1:
        raise ValueError("a page has at least one item")
    more = len(rows) > size
    kept = rows[:size]
    return Page(tuple(value_of(row) for row in kept), key_of(kept[-1]) if more else None)
