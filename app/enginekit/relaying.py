"""What a runtime yields, on its way to a caller who may leave at any time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def closing(responses: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Closed with the block, and not when it is collected one day."""
    try:
        yield responses
    finally:
        close = getattr(responses, "aclose", None)
        if close is not None:
            await close()
