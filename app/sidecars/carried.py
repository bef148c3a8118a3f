"""An order on its way to an engine that carries it out on all ranks by one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from app.domain.weight_sessions import Chunk
from app.enginekit.runtime import Conclusion, Order


class Once:
    """Work that is asked for on behalf of every rank and done once. Who waits for it may go; it is
    broken off by `stop` alone, which the rollback calls."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        await self._work()

    @property
    def began(self) -> bool:
        return self._task is not None

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # looked at: each rank that waited was told


class Pieces:
    """Of an order that comes in pieces: what opens it, and each piece once."""

    def __init__(
        self, begin: Callable[[], Awaitable[None]], take: Callable[[Chunk], Awaitable[None]]
    ) -> None:
        self._open = Once(begin)
        self._take = take
        self._chunks: dict[int, Once] = {}

    async def opened(self) -> None:
        await self._open()

    async def staged(self, chunk: Chunk) -> None:
        if chunk.index not in self._chunks:
            self._chunks[chunk.index] = Once(lambda: self._take(chunk))
        await self._chunks[chunk.index]()

    @property
    def phases(self) -> tuple[Once, ...]:
        return (self._open, *self._chunks.values())


class Carried:
    """`prepare`, `commit` and `undo` are the kit's phases, for all ranks together. `sent` is set
    before the first call that may change something: without it there is nothing to undo. `pieces`:
    of an order that comes in some."""

    pieces: Pieces | None = None

    def __init__(self, order: Order) -> None:
        self.order = order
        self.sent = False
        self.over = False
        self._prepare = Once(self.prepare)
        self._commit = Once(self.commit)
        self._undo = Once(self._stop_and_undo)

    # ---- for the runtime, once for each rank ----

    async def prepared(self) -> None:
        await self._prepare()

    async def committed(self) -> None:
        await self._commit()

    async def rolled_back(self) -> None:
        try:
            await self._undo()
        finally:
            self.over = True

    async def concluded(self) -> Conclusion:
        conclusion = await self.conclude()
        self.over = True
        return conclusion

    async def close(self) -> None:
        for phase in (*self.phases, self._undo):
            await phase.stop()

    @property
    def phases(self) -> tuple[Once, ...]:
        """What a rollback breaks off, in the order in which they come."""
        before = () if self.pieces is None else self.pieces.phases
        return (*before, self._prepare, self._commit)

    async def _stop_and_undo(self) -> None:
        for phase in self.phases:
            await phase.stop()
        if self.sent:
            await self.undo()

    # ---- for each kind of order ----

    async def prepare(self) -> None:
        """Raises RuntimeFault."""

    async def commit(self) -> None:
        """Raises RuntimeFault."""

    async def undo(self) -> None:
        """Of something that was sent. Raises RuntimeFault where it can't be proved undone."""

    async def conclude(self) -> Conclusion:
        return Conclusion()
