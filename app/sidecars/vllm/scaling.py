"""More or fewer data-parallel engines behind the same server (elastic expert parallelism)."""

from __future__ import annotations

from dataclasses import replace

from app.domain.commands import ReconfigureServing
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.answers import field_of
from app.sidecars.carried import Carried
from app.sidecars.faults import remaining_s, told
from app.sidecars.vllm.engine import VllmEngine


class CarriedScaling(Carried):
    """Nothing runs, since the kit has paused. How many ranks there are is read back, and so is that
    none of the new ones serves yet."""

    def __init__(self, order: Order, command: ReconfigureServing, engine: VllmEngine) -> None:
        super().__init__(order)
        assert command.data_parallel_size is not None  # nothing else is offered
        self._wanted = command.data_parallel_size
        self._engine = engine
        self._before = engine.found

    async def commit(self) -> None:
        left_s = remaining_s(self.order.deadline_at)
        self.sent = True
        body = {
            "new_data_parallel_size": self._wanted,
            "drain_timeout": max(1, int(min(left_s, 3_600))),
        }
        await self._engine.post("/scale_elastic_ep", body=body, within_s=left_s)
        await self._engine.freeze()
        if await self._ranks() != self._wanted * self._ranks_each:
            raise RuntimeFault("SCALE_NOT_SEEN", "the engine has not as many ranks as ordered")

    async def undo(self) -> None:
        if await self._ranks() != self._before.world_size:
            raise RuntimeFault("NOT_UNDONE", "the engine has another number of ranks")
        await self._engine.freeze()

    async def conclude(self) -> Conclusion:
        self._engine.found = replace(
            self._before,
            data_parallel_size=self._wanted,
            world_size=self._wanted * self._ranks_each,
        )
        return Conclusion()

    @property
    def _ranks_each(self) -> int:
        return self._before.tensor_parallel_size * self._before.pipeline_parallel_size

    async def _ranks(self) -> int:
        with told():
            answer = await self._engine.http.read("/get_world_size", [("include_dp", "true")])
            return int(field_of(answer, "world_size", int))
