"""Telling those who wait that there may be new events, within this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Wakes:
    """Counts the endings of transactions that wrote events. For one event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._subscriptions = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody is subscribed."""
        return self._subscriptions > 0

    @property
    def count(self) -> int:
        return self._count

    def wake(self) -> None:
        self._count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        self._subscriptions += 1
        try:
            yield Subscription(self)
        finally:
            self._subscriptions -= 1

    async def next(self, timeout_s: float) -> None:
        """Until the next wake, at most so long."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(future)


class Subscription:
    """Holds no database connection, and nothing that a lost one would have to be told."""

    def __init__(self, wakes: Wakes) -> None:
        self._wakes = wakes
        self._seen = wakes.count

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next commit of events, at most so long.

        Returns at once when one was committed since the subscription began, or since the last
        call. True: there may be something new. False: the time is up.
        """
        if self._wakes.count == self._seen:
            await self._wakes.next(timeout_s)
        new = self._wakes.count != self._seen
        self._seen = self._wakes.count
        return new
