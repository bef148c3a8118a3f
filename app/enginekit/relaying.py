"""What a runtime yields, on its way to a caller who may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

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


async def until(ended: asyncio.Event, responses: AsyncIterator[T]) -> AsyncIterator[T]:
    """What comes before the event. A response that is on its way when it comes is given up."""
    over: asyncio.Task[object] = asyncio.create_task(ended.wait())
    following: asyncio.Task[T] | None = None
    try:
        while True:
            following = asyncio.create_task(_next(responses))
            await asyncio.wait({over, following}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                response = following.result()
            except StopAsyncIteration:
                return
            yield response
    finally:
        # The iterator has to be at rest before its owner can close it.
        left: set[asyncio.Task[Any]] = {over} if following is None else {over, following}
        for task in left:
            task.cancel()
        await asyncio.wait(left)


async def _next(responses: AsyncIterator[T]) -> T:
    return await anext(responses)
