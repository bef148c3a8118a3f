"""Looking at a worker. Its metrics are the runtime's own answer; what its callbacks tell is asked
of the engine."""

from __future__ import annotations

from collections.abc import Callable

from app.domain.facts import LoraFact, WeightsFact
from app.domain.kinds import PauseMode, ResourceKind, WeightsState
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import Holding, Observation
from app.sidecars.dynamo.answers import metrics_of
from app.sidecars.dynamo.worker import DynamoWorker
from app.sidecars.http import CallError
from app.sidecars.watching import Orders, Watch


class DynamoWatch(Watch):
    def __init__(self, worker: DynamoWorker, look_s: float) -> None:
        super().__init__(look_s)
        self._worker = worker
        self._loras: tuple[LoraFact, ...] = ()
        self._dead = False

    async def lost(self) -> str | None:
        try:
            metrics = metrics_of(await self._worker.http.read("/metrics"))
        except CallError as error:
            return error.message
        if self._worker.is_another(metrics):
            self.restarted.set()
            return "the worker was started anew"
        return None

    async def glance(self) -> None:
        """An adapter has to show as soon as its order has ended."""
        loras, belief = await self._worker.loras(), self._worker.belief
        self._loras = tuple(
            LoraFact(name, number, belief.path_of(name)) for name, number in loras.items()
        )

    async def look(self, orders: Callable[[], Orders]) -> bool:
        worker, before = self._worker, orders()
        alive = await worker.is_alive()
        paused = await worker.paused()
        if orders() != before:
            return False
        self._dead = not alive
        worker.saw(paused)
        await worker.read_version()
        return True

    @property
    def _closed(self) -> bool:
        """By itself, as a worker without a pause is for as long as it sleeps."""
        worker = self._worker
        return worker.found.routes.pause is None and worker.belief.asleep

    def seen(self, lost: str | None) -> Observation:
        belief = self._worker.belief
        if lost is None and self._dead:
            lost = "the engine does not answer its worker"
        state = belief.weights
        ranks: tuple[RankReport, ...] = ()
        if lost is not None:
            state = WeightsState.UNKNOWN if state is WeightsState.VALID else state
            ranks = (RankReport(0, RankState.FAILED, lost),)
        return Observation(
            weights=WeightsFact(version=belief.version, state=state),
            released=frozenset({ResourceKind.WEIGHTS}) if belief.asleep else frozenset(),
            loras=self._loras,
            ranks=ranks,
            group=self._group,
            holding=Holding(belief.paused or (PauseMode.DRAIN if self._closed else None)),
        )
