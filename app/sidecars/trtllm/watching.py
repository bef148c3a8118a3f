"""Looking at a TensorRT-LLM engine. Its /metrics are left alone: whoever reads them takes them from
others."""

from __future__ import annotations

from collections.abc import Callable

from app.domain.facts import WeightsFact
from app.domain.kinds import PauseMode, WeightsState
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import Holding, Observation, RuntimeFault
from app.sidecars.http import CallError, NotSent
from app.sidecars.trtllm.engine import TrtllmEngine
from app.sidecars.trtllm.memory import State
from app.sidecars.watching import Orders, Watch


class TrtllmWatch(Watch):
    def __init__(self, engine: TrtllmEngine, look_s: float) -> None:
        super().__init__(look_s)
        self._engine = engine

    async def lost(self) -> str | None:
        engine = self._engine
        try:
            health = await engine.http.get("/health")
        except NotSent as error:
            engine.gone = True
            return error.message
        except CallError as error:
            return error.message
        if health.status == 503:
            engine.gone = True
            return "the engine has ended"
        if health.status != 200:  # of something in between, or of a server that has too much to do
            return "the engine's health cannot be read"
        if engine.gone:
            self.restarted.set()
            return "the engine was started anew"
        return None

    async def look(self, orders: Callable[[], Orders]) -> bool:
        engine, before = self._engine, orders()
        if not engine.found.parks:
            return True
        try:
            memory = await engine.read_memory()
        except RuntimeFault:
            if engine.gone:  # which is told when it is there again
                return False
            raise
        return orders() == before and memory.settled

    def seen(self, lost: str | None) -> Observation:
        """A pause that is not the engine's own closing for a release is the gate's alone."""
        engine = self._engine
        memory = engine.memory
        state = WeightsState.VALID if lost is None else WeightsState.UNKNOWN
        if memory.state is State.FAILED:
            state = WeightsState.INCONSISTENT
        holding = None if engine.only_way or not engine.found.parks else Holding(None)
        if memory.state is not State.RUNNING:
            holding = Holding(PauseMode.DRAIN)
        return Observation(
            weights=WeightsFact(state=state),
            released=engine.tags.kinds_of(memory.parked),
            ranks=() if lost is None else (RankReport(0, RankState.FAILED, lost),),
            group=self._group,
            holding=holding,
        )
