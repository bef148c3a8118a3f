"""What a course that waits may be called away by."""

from __future__ import annotations

import asyncio
import contextlib

from app.operations.backoff import Backoff


class Attention:
    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._news = asyncio.Event()

    def call(self) -> None:
        self._news.set()

    async def pause(self, attempt: int) -> None:
        """Between two attempts. Cut short by a call."""
        await self.wait(self._backoff.pause_s(attempt))

    async def wait(self, seconds: float) -> None:
        """Cut short by a call."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            self._news.clear()
