"""What a transaction, which runs in a thread, and a test on the event loop tell each other."""

from __future__ import annotations

import asyncio
import threading

_LONG_S = 30.0


class Signal:
    """`held`: waited for within a transaction. `told`: on the event loop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def held(self) -> None:
        assert self._event.wait(_LONG_S)

    async def told(self) -> None:
        await asyncio.to_thread(self.held)
