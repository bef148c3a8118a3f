"""Looking at a vLLM engine. A call to it that is under way while it ends is never answered, and
keeps the server's process from ending."""

from __future__ import annotations

from collections.abc import Callable

from app.domain.facts import LoraFact, WeightsFact
from app.enginekit.runtime import Holding, Observation
from app.sidecars.answers import served_models
from app.sidecars.faults import told
from app.sidecars.http import CallError
from app.sidecars.vllm.answers import metrics_of
from app.sidecars.vllm.engine import VllmEngine
from app.sidecars.watching import Orders, Watch, ranks_if, weights_if


class VllmWatch(Watch):
    def __init__(self, engine: VllmEngine, look_s: float) -> None:
        super().__init__(look_s)
        self._engine = engine
        self._loras: tuple[LoraFact, ...] = ()

    async def lost(self) -> str | None:
        http = self._engine.http
        try:
            health = await http.get("/health")
            if health.status != 200:
                return "the engine has ended"
            metrics = metrics_of(await http.read("/metrics"))
        except CallError as error:
            return error.message
        known = self._engine.found.identity.started_at
        if known is not None and metrics.started_at != known:
            self.restarted.set()
            return "the engine was started anew"
        return None

    async def glance(self) -> None:
        with told():
            models = served_models(await self._engine.http.read("/v1/models"))
        self._loras = tuple(
            LoraFact(model.name, self._engine.number_of(model.name), model.root)
            for model in models
            if model.parent is not None
        )

    async def look(self, orders: Callable[[], Orders]) -> bool:
        engine, before = self._engine, orders()
        if engine.found.has("/is_paused"):
            paused = await engine.is_paused()
            sleep = (await engine.metrics()).sleep
            if orders() != before:
                return False
            if paused != (engine.belief.paused is not None):
                engine.saw(paused=paused, sleep=sleep)
        await engine.read_version()
        return True

    def seen(self, lost: str | None) -> Observation:
        engine = self._engine
        belief = engine.belief
        state = weights_if(lost, belief.weights)
        pauses = engine.found.has("/is_paused")
        return Observation(
            weights=WeightsFact(version=engine.version, state=state),
            released=belief.released,
            loras=self._loras,
            ranks=ranks_if(lost, engine.found.world_size),
            group=self._group,
            holding=Holding(belief.paused) if pauses else None,
        )
