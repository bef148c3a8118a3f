"""Clients on every engine of a bed: some write, others read everything or one operation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.robustness.bed import WAIT_S, Bed, until
from tests.robustness.history import Delivered


@dataclass(frozen=True)
class Listener:
    """A reader of everything, or of what happens at one engine. `ends`: of which operations it has
    heard the terminal event."""

    engine: str | None
    task: asyncio.Task[int]
    ends: set[str]
    begun: asyncio.Event


@dataclass
class Traffic:
    """`listeners`: half of them to everything, half of them to the first engine. `cut`: after how
    many events a connection of any reader is dropped."""

    bed: Bed
    listeners: int = 2
    cut: Callable[[], int | None] = lambda: None
    operations: dict[str, str] = field(default_factory=dict)  # id to engine
    ended: int = 0
    _stopping: bool = False
    _writers: list[asyncio.Task[None]] = field(default_factory=list)
    _listening: list[Listener] = field(default_factory=list)
    _following: list[asyncio.Task[int]] = field(default_factory=list)

    async def begin(self) -> None:
        """The writers once all listeners listen, or some ends would be over before they came."""
        first = next(iter(self.bed.engines))
        for number in range(self.listeners):
            self._listening.append(self._listen(number, first if number % 2 else None))
        await self.until(lambda: all(each.begun.is_set() for each in self._listening))
        for engine in self.bed.engines:
            self._writers.append(asyncio.create_task(self._pause_and_resume(engine)))
            self._writers.append(asyncio.create_task(self._flush(engine)))

    async def more(self, count: int) -> None:
        """Until so many more operations have ended."""
        wanted = self.ended + count
        await self.until(lambda: self.ended >= wanted)

    async def until(self, holds: Callable[[], bool]) -> None:
        def looked_at() -> bool:
            self._raise()
            return holds()

        await until(looked_at)

    def _raise(self) -> None:
        """What ended a client that should not have ended."""
        for task in (*self._writers, *self._following, *(each.task for each in self._listening)):
            if task.done():
                task.result()

    async def end(self) -> None:
        """Everything under way comes to its end, and every reader hears of it."""
        self._stopping = True
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self._writers)
            await asyncio.gather(*self._following)
        await self.until(self._all_heard)
        for each in self._listening:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in self._listening), return_exceptions=True)

    def _all_heard(self) -> bool:
        return all(
            name in listener.ends
            for listener in self._listening
            for name, engine in self.operations.items()
            if listener.engine in (None, engine)
        )

    # ---- clients ----

    def _cut(self) -> int | None:
        # Who is cut off after a few events lags behind the writers, and catches up at the end.
        return None if self._stopping else self.cut()

    def _listen(self, number: int, engine: str | None) -> Listener:
        ends: set[str] = set()
        begun = asyncio.Event()

        def on_event(told: Delivered) -> None:
            if told.state is not None:
                ends.add(told.operation)

        hearing = self.bed.clients.hear(
            f"listener-{number}",
            engines=None if engine is None else [engine],
            on_event=on_event,
            cut=self._cut,
            begun=begun,
        )
        return Listener(engine, asyncio.create_task(hearing), ends, begun)

    async def _pause_and_resume(self, engine: str) -> None:
        chance = self.bed.clients.chance
        while not self._stopping:
            mode = chance.choice(("drain", "abort", "keep"))
            paused = await self._order(engine, "pause", {"mode": mode}, "pause")
            if paused is not None and paused["state"] == "succeeded":
                epoch = paused["result"]["pause_epoch"]
                await self._order(engine, "resume", {"pause_epoch": epoch}, "resume")

    async def _flush(self, engine: str) -> None:
        while not self._stopping:
            await self._order(engine, "flush-caches", {"caches": ["prefix"]}, "flush_caches")

    async def _order(
        self, engine: str, verb: str, body: dict[str, Any], kind: str
    ) -> dict[str, Any] | None:
        clients = self.bed.clients
        key = clients.name("key")
        operation = await clients.order(engine, verb, body, kind=kind, key=key)
        if operation is None:
            return None
        self.operations[operation] = engine
        hearing = clients.hear(f"of-{operation}", operation=operation, cut=self._cut)
        self._following.append(asyncio.create_task(hearing))
        found = await clients.ended(operation)
        self.ended += 1
        if clients.chance.random() < 0.3:  # a client that does not trust its memory
            await clients.try_order(engine, verb, body, kind=kind, key=key)
        return found
