"""Hearing from other gateways on the same PostgreSQL that there are new events, and telling them.

An announcement only says "look"; what is lost costs the time until the next poll. It is sent after
the commit and not within the transaction: PostgreSQL commits transactions that notify one after
the other, which would make one queue of all writers. One announcement may stand for many commits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from app.ledger.positions import LAST_TAKEN, OLDEST_WRITER
from app.ledger.wakes import Wakes

_log = logging.getLogger(__name__)

_CHANNEL = "chadburn_events"
# Of the family of locks around upgrades; whoever must be alone with a ledger tries for all of it.
_SHARE = "SELECT pg_advisory_lock_shared(1128414562, 3)"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class Watch:
    """Two connections of its own, so that a busy pool delays nothing: one listens, one announces
    and polls. Both are made again when they break."""

    def __init__(
        self, options: Mapping[str, Any], wakes: Wakes, *, name: str, poll_interval_s: float
    ) -> None:
        """`options`: how to connect. `name`: of this ledger among those of other processes; its
        own announcements are not news to it."""
        self._options = options
        self._wakes = wakes
        self._name = name
        self._poll_interval_s = poll_interval_s
        self._unsaid = asyncio.Event()
        self._seen: tuple[object, object] = (None, None)
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        self._tasks = tuple(
            asyncio.create_task(self._again_and_again(once)) for once in (self._listen, self._speak)
        )

    def announce(self) -> None:
        """Soon, and without waiting for it."""
        self._unsaid.set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _again_and_again(self, once: Callable[[], Awaitable[None]]) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            begun = time.monotonic()
            try:
                await once()
            except (psycopg.Error, OSError) as error:
                _log.warning("the ledger's watch lost its connection: %s", type(error).__name__)
            held_s = time.monotonic() - begun
            pause_s = _FIRST_PAUSE_S if held_s > _LONGEST_PAUSE_S else pause_s * 2
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(**self._options, autocommit=True) as made:
            yield made

    async def _listen(self) -> None:
        async with self._connection() as connection:
            await connection.execute(f"LISTEN {_CHANNEL}")
            # Whatever was announced while nobody listened.
            self._wakes.wake()
            async for note in connection.notifies():
                if note.payload != self._name:
                    self._wakes.wake()

    async def _speak(self) -> None:
        async with self._connection() as connection:
            # What is announced is on disk already; the announcement itself need not be.
            await connection.execute("SET synchronous_commit = off")
            await connection.execute(_SHARE)
            polled = time.monotonic()
            while True:
                try:
                    async with asyncio.timeout(self._poll_interval_s):
                        await self._unsaid.wait()
                except TimeoutError:
                    pass
                else:
                    await self._say(connection)
                if self._wakes.wanted and time.monotonic() - polled >= self._poll_interval_s:
                    polled = time.monotonic()
                    await self._poll(connection)

    async def _say(self, connection: psycopg.AsyncConnection[Any]) -> None:
        # First, so that a commit in the meantime gets an announcement of its own.
        self._unsaid.clear()
        try:
            await connection.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, self._name))
        except BaseException:
            self._unsaid.set()  # said on the next connection
            raise

    async def _poll(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Wake those who wait if a position was taken, or a writer has ended, since the last
        look: also one that was rolled back, or whose process died without a word."""
        last = await (await connection.execute(LAST_TAKEN)).fetchone()
        oldest = await (await connection.execute(OLDEST_WRITER)).fetchone()
        if (last, oldest) != self._seen:
            self._seen = (last, oldest)
            self._wakes.wake()
