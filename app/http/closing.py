"""The end of the process, as streams hear of it: before connections are asked to close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Closing:
    """Set once, in the event loop. Whoever sleeps in a stream is woken by what it gave to
    `tell`."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._told: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._begun.is_set()

    async def unless(self, work: Awaitable[T]) -> T | None:
        """What `work` gives; None if the process begins to end first. `work` is then cancelled,
        so it must be one that only waits."""
        working = asyncio.ensure_future(work)
        begun = asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait({working, begun}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, begun):
                task.cancel()
            await asyncio.gather(working, begun, return_exceptions=True)

    def tell(self, wake: Callable[[], None]) -> None:
        self._told.append(wake)

    def set(self) -> None:
        self._begun.set()
        for wake in self._told:
            wake()
