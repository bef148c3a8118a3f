"""Orders that are given without a break, and everything that is heard of them meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

from app.domain.events import TERMINAL_EVENTS
from tests.e2e.driving import Gateway, Heard, Json, server_sent

CONTROL = frozenset({"snapshot", "reset", "goodbye"})
# The same order may be sent again after all of these.
LATER = frozenset({429, 502, 503, 504})
PAUSE_S = 0.1


@dataclass
class Load:
    """`taken`: what was acknowledged, id to engine. `answers`: by status; `broken`: connections
    that ended without one. Each order is sent until it is taken, under its one key."""

    gateway: Gateway
    taken: dict[str, str] = field(default_factory=dict)
    answers: Counter[int] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    _ends: asyncio.Event = field(default_factory=asyncio.Event)
    _workers: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, engines: list[str], workers: int) -> None:
        for engine in engines:
            for number in range(workers):
                work = self._work(engine, twice=number % 2 == 0)
                self._workers.append(asyncio.create_task(work))

    async def stop(self) -> None:
        """Once what every worker has given has ended."""
        self._ends.set()
        await asyncio.gather(*self._workers)
        self._workers.clear()
        self._ends.clear()

    async def some_more(self, number: int) -> None:
        """Until so many more have been taken."""
        wanted = len(self.taken) + number
        while len(self.taken) < wanted:
            for worker in self._workers:
                if worker.done():
                    worker.result()  # what it failed with
            await asyncio.sleep(0.02)

    async def order(self, engine: str, verb: str, body: Json, key: str | None = None) -> str:
        """The operation's id, whatever happens on the way. It waits where the engine is busy."""
        key = key or str(uuid.uuid4())
        body = {"when_busy": "queue", **body}
        while True:
            try:
                answer = await self.gateway.order(engine, verb, body, key=key)
            except httpx2.TransportError as error:
                self.broken[type(error).__name__] += 1
            else:
                self.answers[answer.status_code] += 1
                if answer.status_code in (200, 202):
                    operation = str(answer.json()["id"])
                    self.taken[operation] = engine
                    return operation
                assert answer.status_code in LATER, answer.text
            await asyncio.sleep(PAUSE_S)

    async def ended(self, operation: str) -> Json:
        while True:
            try:
                answer = await self.gateway.client.get(f"/v1/operations/{operation}")
            except httpx2.TransportError as error:
                self.broken[type(error).__name__] += 1
            else:
                if answer.status_code == 200 and answer.json()["done"]:
                    return dict(answer.json())
                assert answer.status_code == 200 or answer.status_code in LATER, answer.text
            await asyncio.sleep(PAUSE_S)

    async def _work(self, engine: str, *, twice: bool) -> None:
        # Longer than an engine takes to start again on a machine that is busy.
        body = {"caches": ["prefix"], "deadline_ms": 600_000}
        while not self._ends.is_set():
            key = str(uuid.uuid4())
            times = 2 if twice else 1  # at once: they may come to two gateways
            orders = [self.order(engine, "flush-caches", body, key) for _ in range(times)]
            found = set(await asyncio.gather(*orders))
            assert len(found) == 1, f"one key, and {found}"
            await self.ended(found.pop())


@dataclass
class Watch:
    """The whole fleet's stream, resumed by its id each time it ends."""

    gateway: Gateway
    heard: list[Heard] = field(default_factory=list)
    starts: int = 0
    goodbyes: int = 0
    task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Returns once it is open: everything that happens from then on is heard."""
        self.task = asyncio.create_task(self._run())
        while not self.starts:
            if self.task.done():
                self.task.result()
            await asyncio.sleep(0.01)

    async def until(self, operations: set[str]) -> None:
        """The end of all of them has been heard."""
        assert self.task is not None
        while not operations <= {
            one.data["operation"] for one in self.heard if one.type in TERMINAL_EVENTS
        }:
            if self.task.done():
                self.task.result()
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        last: str | None = None
        while True:
            try:
                async with self.gateway.stream("/v1/events", last) as response:
                    if response.status_code == 200:
                        async for heard in server_sent(response.aiter_lines()):
                            last = heard.id or last
                            self._keep(heard)
                    else:
                        assert response.status_code in LATER, response.status_code
            except httpx2.TransportError:
                pass
            await asyncio.sleep(PAUSE_S)

    def _keep(self, heard: Heard) -> None:
        if heard.type == "snapshot":
            assert not self.starts, "the stream began anew"
            self.starts = 1
        assert heard.type != "reset", "the stream could not go on where it ended"
        self.goodbyes += heard.type == "goodbye"
        if heard.type not in CONTROL:
            self.heard.append(heard)

    def faults(self, operations: set[str]) -> list[str]:
        """What is wrong with what was heard of them."""
        found = []
        positions = [one.data["position"] for one in self.heard]
        if positions != sorted(set(positions)):
            found.append("positions do not rise")
        of: dict[str, list[Any]] = {one: [] for one in operations}
        for one in self.heard:
            if one.data["operation"] in of:
                of[one.data["operation"]].append(one)
        for operation, events in of.items():
            found += gaps(operation, [(e.data["sequence"], e.type) for e in events])
        return found


def gaps(operation: str, events: list[tuple[int, str]]) -> list[str]:
    """What is wrong with one operation's events: sequence and type of each."""
    found = []
    if [sequence for sequence, _ in events] != list(range(1, len(events) + 1)):
        found.append(f"{operation}: sequences {[sequence for sequence, _ in events]}")
    ends = [kind for _, kind in events if kind in TERMINAL_EVENTS]
    if len(ends) != 1 or not events or events[-1][1] != ends[0]:
        found.append(f"{operation}: ended {len(ends)} times")
    return found
