"""Release and restore: what of the engine's memory is given back."""

from __future__ import annotations

from dataclasses import replace

from app.domain.commands import ReleaseResources, RestoreResources
from app.domain.kinds import WeightsState
from app.domain.operation import OperationWarning
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.carried import Carried
from app.sidecars.faults import refused
from app.sidecars.vllm.belief import KV, WEIGHTS, Step
from app.sidecars.vllm.engine import VllmEngine

OPENED_BRIEFLY = OperationWarning(
    "ADMISSION_OPENED_BRIEFLY",
    "the engine opens itself when nothing is asleep any more: it was paused again at once, and what"
    " it had begun meanwhile is frozen",
)
KV_GOES_ALONG = OperationWarning(
    "KV_CACHE_RELEASED_TOO",
    "the engine gives its KV memory back together with its weights, and takes it again with them",
)
KV_NOT_KEPT = OperationWarning(
    "KV_CACHE_NOT_KEPT", "what the engine had cached is dropped: later requests compute it again"
)

KV_WAITS = OperationWarning(
    "KV_CACHE_WAITS",
    "the engine opens itself with the last of its memory, so KV stays away until weights are"
    " there and valid",
)


class CarriedRelease(Carried):
    """Nothing runs, since the kit has paused; and nothing may be frozen, by others either: its KV
    would be gone."""

    def __init__(self, order: Order, command: ReleaseResources, engine: VllmEngine) -> None:
        super().__init__(order)
        self._kinds = frozenset(command.resources)
        self._content = command.content
        self._engine = engine
        self._before = engine.belief
        self._steps: tuple[Step, ...] = ()
        self._opened = False

    async def prepare(self) -> None:
        engine = self._engine
        if self._before.paused is None:
            raise refused("NOT_PAUSED", "the engine is not paused")
        if (await engine.metrics()).in_flight:
            raise refused("REQUESTS_FROZEN", "requests are frozen, and would lose their KV")
        # Releasing KV alone is not for every device, and leaves a mess where it fails.
        selective = engine.found.has("/release_kv_cache_memory") and engine.found.device != "cpu"
        self._steps = self._before.release(self._kinds, self._content, selective=selective)

    async def commit(self) -> None:
        for step in self._steps:
            self.sent = True
            self._opened = await self._engine.take(step) or self._opened
        belief = self._engine.belief
        self._engine.believe(replace(belief, released=self._before.released | self._kinds))

    async def undo(self) -> None:
        engine = self._engine
        whole = not self._before.asleep and engine.belief.weights is self._before.weights
        if not whole:
            raise RuntimeFault("NOT_UNDONE", "what was released cannot be taken back for sure")
        await engine.wake_wholly()
        engine.believe(self._before)

    async def conclude(self) -> Conclusion:
        warnings = [OPENED_BRIEFLY] if self._opened else []
        if WEIGHTS in self._kinds and KV not in self._kinds | self._before.released:
            warnings.append(KV_GOES_ALONG)
        if self._steps:
            warnings.append(KV_NOT_KEPT)
        return Conclusion(warnings=tuple(warnings))


class CarriedRestore(Carried):
    def __init__(self, order: Order, command: RestoreResources, engine: VllmEngine) -> None:
        super().__init__(order)
        self._kinds = frozenset(command.resources)
        self._engine = engine
        self._before = engine.belief
        self._opened = False

    async def prepare(self) -> None:
        before = self._before
        only_kv = WEIGHTS not in self._kinds and WEIGHTS in before.released
        if only_kv and before.weights is not WeightsState.VALID:
            raise refused("WEIGHTS_FIRST", "restore the weights, update them, and then KV")

    async def commit(self) -> None:
        for step in self._before.restore(self._kinds):
            self.sent = True
            self._opened = await self._engine.take(step) or self._opened
        belief = self._engine.belief
        self._engine.believe(replace(belief, released=belief.released - self._kinds))

    async def undo(self) -> None:
        raise RuntimeFault("NOT_UNDONE", "what was restored cannot be given back for sure")

    async def conclude(self) -> Conclusion:
        waits = self._engine.belief.asleep - self._engine.belief.released
        warnings = [OPENED_BRIEFLY] if self._opened else []
        if waits:
            warnings.append(KV_WAITS)
        return Conclusion(warnings=tuple(warnings))
