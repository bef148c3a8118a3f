"""Release and restore: what of the engine's memory is given back."""

from __future__ import annotations

from dataclasses import replace

from app.domain.commands import ReleaseResources, RestoreResources
from app.domain.kinds import ContentPolicy, PauseMode, ResourceKind, WeightsState
from app.domain.operation import OperationWarning
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.carried import Carried
from app.sidecars.faults import refused
from app.sidecars.sglang.engine import SglangEngine

KV_NOT_KEPT = OperationWarning(
    "KV_CACHE_NOT_KEPT", "what the engine had cached is dropped: later requests compute it again"
)
NOTHING_SAVED = OperationWarning(
    "MEMORY_STAYS",
    "the engine was not started to give memory back: it keeps it, and what is in it",
)


class CarriedRelease(Carried):
    """The kit has paused. SGLang ends unless nothing runs, so that is proved first; what a pause of
    mode keep has frozen goes back into the queue for it, and is computed again."""

    def __init__(self, order: Order, command: ReleaseResources, engine: SglangEngine) -> None:
        super().__init__(order)
        self._kinds = frozenset(command.resources)
        self._content = command.content
        self._engine = engine
        self._before = engine.belief
        # What was preserved can still be discarded, and is away already.
        self._new = self._kinds - engine.belief.released

    async def prepare(self) -> None:
        self._engine.belief.may_release(self._new)
        frozen = self._before.paused is PauseMode.KEEP
        if frozen and self._content is ContentPolicy.DISCARD and await self._some_frozen():
            raise refused("REQUESTS_FROZEN", "requests are frozen, and would lose what they have")
        if self._new:
            await self._engine.prove_idle()

    async def _some_frozen(self) -> bool:
        """As the scheduler told just before it was held."""
        return bool((await self._engine.loads()).in_flight)

    async def commit(self) -> None:
        engine = self._engine
        if self._new:
            # Once more: since then it was possible for somebody else to resume it.
            await engine.prove_idle()
            self.sent = True
            await engine.release(self._new)
        if ResourceKind.WEIGHTS in self._kinds and self._content is ContentPolicy.DISCARD:
            engine.believe(replace(engine.belief, weights=WeightsState.MISSING))

    async def undo(self) -> None:
        if self._engine.belief.released != self._before.released:
            raise RuntimeFault("NOT_UNDONE", "what was released cannot be taken back for sure")

    async def conclude(self) -> Conclusion:
        warnings = [] if self._engine.found.saves else [NOTHING_SAVED]
        if ResourceKind.KV_CACHE in self._new and self._content is ContentPolicy.PRESERVE:
            warnings.append(KV_NOT_KEPT)
        return Conclusion(warnings=tuple(warnings))


class CarriedRestore(Carried):
    def __init__(self, order: Order, command: RestoreResources, engine: SglangEngine) -> None:
        super().__init__(order)
        self._kinds = frozenset(command.resources)
        self._engine = engine
        self._before = engine.belief

    async def prepare(self) -> None:
        self._engine.belief.may_restore(self._kinds)
        await self._engine.same()

    async def commit(self) -> None:
        self.sent = True
        await self._engine.restore(self._kinds)

    async def undo(self) -> None:
        if self._engine.belief.released != self._before.released:
            raise RuntimeFault("NOT_UNDONE", "what was restored cannot be given back for sure")
