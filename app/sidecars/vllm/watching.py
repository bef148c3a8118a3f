"""Looking at an engine without standing in its way.

What the server answers by itself is read each time. What it has to ask the engine is read seldom:
a call that is under way while the engine dies is never answered, and keeps the server's process
from ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from app.domain.facts import LoraFact, WeightsFact
from app.domain.kinds import WeightsState
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import Holding, Observation, RuntimeFault
from app.sidecars.vllm.answers import metrics_of, served_models
from app.sidecars.vllm.engine import VllmEngine, told
from app.sidecars.vllm.http import VllmError


@dataclass(frozen=True, slots=True)
class Orders:
    """How many have begun so far."""

    begun: int
    under_way: bool


class Watch:
    """`restarted` is set when another process answers, or the engine behind it was started anew.
    `look_s`: how often the engine itself is asked."""

    def __init__(self, engine: VllmEngine, look_s: float) -> None:
        self._engine = engine
        self._look_s = look_s
        self._looked_at = float("-inf")
        self._group = 0
        self._paused_or_not_known = False
        self._loras: tuple[LoraFact, ...] = ()
        self.restarted = asyncio.Event()

    def doubt(self) -> None:
        """A pause, a resume or an adapter could not be undone for sure. Weights are as they were,
        so that the engine is right again as soon as it can be read."""
        self._paused_or_not_known = True

    def look_again(self) -> None:
        self._looked_at = float("-inf")

    async def observe(self, orders: Callable[[], Orders]) -> Observation:
        """An order that is under way says by itself what it changes."""
        lost = await self._lost()
        if lost is not None:
            return self._told(lost)
        if not orders().under_way:
            await self._read(orders)
        return self._told(None)

    async def _lost(self) -> str | None:
        http = self._engine.http
        try:
            health = await http.get("/health")
            if health.status != 200:
                return "the engine has ended"
            metrics = metrics_of(await http.read("/metrics"))
        except VllmError as error:
            return error.message
        known = self._engine.found.identity.started_at
        if known is not None and metrics.started_at != known:
            self.restarted.set()
            return "the engine was started anew"
        return None

    async def _read(self, orders: Callable[[], Orders]) -> None:
        """Raises RuntimeFault."""
        engine, before = self._engine, orders()
        with told():
            models = served_models(await engine.http.read("/v1/models"))
        self._loras = tuple(
            LoraFact(model.name, self._engine.number_of(model.name), model.root)
            for model in models
            if model.parent is not None
        )
        now = asyncio.get_running_loop().time()
        if now < self._looked_at + self._look_s:
            return
        if engine.found.has("/is_paused"):
            paused = await engine.is_paused()
            sleep = (await engine.metrics()).sleep
            if orders() != before:
                return  # what was read may be of before or of after
            if paused != (engine.belief.paused is not None):
                engine.saw(paused=paused, sleep=sleep)
        await engine.read_version()
        self._looked_at = now
        if self._paused_or_not_known:
            self._paused_or_not_known = False
            self._group += 1

    def _told(self, lost: str | None) -> Observation:
        engine = self._engine
        belief = engine.belief
        state = belief.weights
        ranks: tuple[RankReport, ...] = ()
        if lost is not None:
            state = WeightsState.UNKNOWN if state is WeightsState.VALID else state
            ranks = tuple(
                RankReport(rank, RankState.FAILED, lost) for rank in range(engine.found.world_size)
            )
        pauses = engine.found.has("/is_paused")
        return Observation(
            weights=WeightsFact(version=engine.version, state=state),
            released=belief.released,
            loras=self._loras,
            ranks=ranks,
            group=self._group,
            holding=Holding(belief.paused) if pauses else None,
        )


async def watched(engine: VllmEngine, look_s: float) -> Watch:
    """Raises RuntimeFault when it cannot be observed at all."""
    watch = Watch(engine, look_s)
    seen = await watch.observe(lambda: Orders(begun=0, under_way=False))
    if seen.ranks:
        raise RuntimeFault("ENGINE_UNREACHABLE", seen.ranks[0].message, retryable=True)
    return watch
