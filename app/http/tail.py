"""The newest events in memory, read once for all streams.

Without it, each commit would send every open stream to the database. One reader follows the
ledger and keeps the last few thousand events; a stream that is near the end reads here, and one
that is further behind, or slow, reads the ledger at its own pace. So there is no buffer per
stream that could overflow, and nothing is ever dropped.

All streams together take two connections to the database at most: one for the follower, and one
for whoever opens or is behind, in turn. The requests of everybody else have the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from app.domain.errors import ChadburnError
from app.ledger.errors import HistoryPruned
from app.ledger.ledger import Ledger
from app.ledger.values import EventFilter, StoredEvent
from app.observability.log import logger

_PAUSE_S = 0.5
_SPELLED = 512
_EVERYTHING = EventFilter()
_log = logger("chadburn.streams")


class Tail:
    """`position` is the ledger's position up to which everything is known here."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        kept: int = 4096,
        batch: int = 500,
        look_every_s: float = 5.0,
        gather_s: float = 0.01,
        unheard_s: float = 0.1,
        on_event: Callable[[StoredEvent], Awaitable[None]] | None = None,
    ) -> None:
        """`on_event` is told each event that commits while this process runs, in order.
        `gather_s`: between one reading and the next, so that many commits are read at once; the
        first after a pause is read immediately. `unheard_s`: the same while no stream waits: each
        reading costs a third of what taking on an order costs the ledger."""
        self._ledger = ledger
        self._batch = batch
        self._look_every_s = look_every_s
        self._gather_s = gather_s
        self._unheard_s = unheard_s
        self._waiting = 0
        self._called = asyncio.Event()
        self._on_event = on_event
        self._kept: deque[StoredEvent] = deque(maxlen=kept)
        self._spelled: dict[int, tuple[StoredEvent, bytes]] = {}
        self._begin = 0  # everything behind it, up to `position`, is in `_kept`
        self.position = 0
        self.turn = asyncio.Lock()
        """Held by a stream while it reads the ledger."""
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._begin = self.position = await self._ledger.events.horizon()
        self._task = asyncio.create_task(self._follow(), name="event-tail")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def after(
        self, position: int, wanted: EventFilter, limit: int = 500
    ) -> tuple[tuple[StoredEvent, ...], int]:
        """As `ledger.events.after`: the matching events behind `position`, and the horizon.

        Raises HistoryPruned."""
        if position < self._begin:
            async with self.turn:
                return await self._ledger.events.after(position, wanted, limit)
        newer: list[StoredEvent] = []
        for stored in reversed(self._kept):  # a reader is near the end, or it is not here
            if stored.position <= position:
                break
            if _matches(stored, wanted):
                newer.append(stored)
        newer.reverse()
        if len(newer) > limit:
            return tuple(newer[:limit]), newer[limit - 1].position
        return tuple(newer), max(self.position, position)

    async def moved_past(self, position: int, timeout_s: float) -> bool:
        """Wait until something is known behind `position`, or someone woke all who wait; False:
        the time is up.

        Holds no connection. Nothing can fall between a read and this: it compares positions
        before it waits, in one go of the event loop.
        """
        if self.position > position:
            return True
        moved = self._moved
        self._waiting += 1
        self._called.set()
        try:
            async with asyncio.timeout(timeout_s):
                await moved.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    def spelled(self, stored: StoredEvent, spell: Callable[[StoredEvent], bytes]) -> bytes:
        """As streams say it, spelled for the first of them and kept for the others."""
        known = self._spelled.get(stored.position)
        if known is not None and known[0] is stored:
            return known[1]
        text = spell(stored)
        self._spelled[stored.position] = (stored, text)
        if len(self._spelled) > _SPELLED:
            del self._spelled[next(iter(self._spelled))]
        return text

    def wake(self) -> None:
        """Let everyone who waits look again, though nothing has moved."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def _follow(self) -> None:
        with self._ledger.events.subscribe() as subscription:
            while True:
                try:
                    if await self._take_batch():
                        await self._gather()
                        await subscription.changed(self._look_every_s)
                except Exception as error:
                    # Every stream hangs on this task, so it outlives what goes wrong in it. The
                    # position has not moved past what was not read: nothing is lost.
                    _log.warning("tail_interrupted", exc_info=error)
                    await asyncio.sleep(_PAUSE_S)

    async def _gather(self) -> None:
        if self._waiting:
            await asyncio.sleep(self._gather_s)
            return
        self._called.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._unheard_s):
                await self._called.wait()

    async def _take_batch(self) -> bool:
        """Read on once. True: that was all there is for now."""
        try:
            events, horizon = await self._ledger.events.after(
                self.position, _EVERYTHING, self._batch
            )
        except HistoryPruned:
            # This process stood still for longer than history is kept. Streams find out by
            # themselves that they have missed something.
            self._kept.clear()
            self._begin = self.position = await self._ledger.events.horizon()
            self.wake()
            return False
        for stored in events:
            if len(self._kept) == self._kept.maxlen:
                self._begin = self._kept[0].position
            self._kept.append(stored)
        if horizon > self.position:
            self.position = horizon
            self.wake()
        for stored in events:
            await self._tell(stored)
        return len(events) < self._batch

    async def _tell(self, stored: StoredEvent) -> None:
        if self._on_event is None:
            return
        try:
            await self._on_event(stored)
        except ChadburnError as error:
            _log.warning("event_not_counted", exc_info=error)


def _matches(stored: StoredEvent, wanted: EventFilter) -> bool:
    event = stored.event
    return (
        (wanted.engine_ids is None or event.engine_id in wanted.engine_ids)
        and (wanted.operation_id is None or event.operation_id == wanted.operation_id)
        and (not wanted.kinds or stored.kind in wanted.kinds)
        and (not wanted.types or event.type in wanted.types)
    )
