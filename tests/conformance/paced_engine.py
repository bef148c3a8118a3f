"""The minimal engine with requests that take their time, and ranks that can be broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from itertools import cycle, islice

from app.conformance.hook import HookFailed
from app.domain.facts import WeightsFact
from app.domain.kinds import WeightsState
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import Order, RuntimeFault
from app.rpc.openengine.v1 import generation_pb2
from tests.doubles.engine import EngineDouble
from tests.enginekit.minimal_engine import MinimalEngine, hang

_A_TOKEN_S = 0.004


class PacedEngine(MinimalEngine):
    """Says the words of the prompt over and over, as many as it is asked for, each with `accent`
    at its end."""

    accent = ""

    async def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        longer = generation_pb2.GenerateRequest()
        longer.CopyFrom(request)
        wanted = request.stopping.max_tokens or 8
        words = [f"{word}{self.accent}" for word in request.prompt.split()]
        longer.prompt = " ".join(islice(cycle(words), wanted))
        async with aclosing(super().generate(longer)) as said:  # type: ignore[type-var]
            async for response in said:
                yield response
                await asyncio.sleep(_A_TOKEN_S)

    def lose(self, rank: int) -> None:
        """As if its process had died: requests end, and it does nothing it is told."""

        async def gone(_order: Order, _rank: int) -> None:
            raise RuntimeFault("RANK_LOST", f"rank {rank} is gone")

        for phase in ("prepare", "commit", "rollback"):
            self.script(phase, gone, rank)
        self.observation = replace(
            self.observation,
            weights=WeightsFact("v1", WeightsState.MISSING),
            ranks=(RankReport(rank, RankState.FAILED, "gone"),),
        )
        for request in self._requests.values():
            request.aborted = "rank lost"
        self._wake_all()

    def stop(self, rank: int) -> None:
        """As if its process had been stopped."""
        for phase in ("prepare", "commit", "rollback"):
            self.script(phase, hang, rank)


class InProcessHook:
    """What a fault hook does, done to an engine in this process."""

    def __init__(self, double: EngineDouble) -> None:
        self._double = double

    async def run(self, *words: str) -> None:
        engine = self._double.engine
        assert isinstance(engine, PacedEngine)
        match words:
            case ("kill-rank", rank):
                engine.lose(int(rank))
            case ("stop-rank", rank):
                engine.stop(int(rank))
            case ("restart",):
                await self._double.restart()
            case _:
                raise HookFailed("no such fault")
