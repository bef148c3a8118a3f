"""Another role in prefill/decode disaggregation, or more ranks (elastic expert parallelism)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from app.domain.commands import ReconfigureServing
from app.domain.kinds import EngineRole
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.answers import field_of
from app.sidecars.carried import Carried
from app.sidecars.faults import remaining_s, told
from app.sidecars.sglang.answers import succeeded
from app.sidecars.sglang.engine import SglangEngine

ROLES = {"null": EngineRole.AGGREGATED, "prefill": EngineRole.PREFILL, "decode": EngineRole.DECODE}
_LOOK_S = 0.5


class CarriedReconfiguring(Carried):
    """Nothing runs, since the kit has paused, which is proved again: a role is torn down and built
    anew, and where that fails the engine is lost."""

    def __init__(self, order: Order, command: ReconfigureServing, engine: SglangEngine) -> None:
        super().__init__(order)
        self._role = command.role
        self._size = command.data_parallel_size
        self._engine = engine
        self._before = engine.found
        self._safe = False

    async def prepare(self) -> None:
        size, now = self._size, self._before.data_parallel_size
        if self._role is not None and size is not None:
            raise RuntimeFault("ONE_CHANGE", "one change at a time", code="INVALID_ARGUMENT")
        if self._role is EngineRole.AGGREGATED:
            raise RuntimeFault(
                "ROLE_NOT_OFFERED",
                "the engine is switched between prefill and decode alone",
                code="INVALID_ARGUMENT",
            )
        if size is not None and size < now:
            raise RuntimeFault(
                "SCALE_DOWN_NOT_OFFERED", "ranks are added, not taken away", code="INVALID_ARGUMENT"
            )
        await self._engine.prove_idle()

    async def commit(self) -> None:
        self.sent = True
        if self._role is not None:
            await self._switch(self._role)
        elif self._size is not None and self._size != self._before.data_parallel_size:
            await self._scale(self._size)

    async def _switch(self, role: EngineRole) -> None:
        try:
            answer = await self._engine.post(
                "/pd_role_switch",
                body={"new_role": role.value},
                within_s=remaining_s(self.order.deadline_at),
            )
        except RuntimeFault as fault:
            self._safe = fault.reason == "ENGINE_REFUSED" and await self._as_before()
            raise
        with told():
            succeeded(answer)
        if ROLES.get((await self._engine.read_model()).role) is not role:
            raise RuntimeFault("ROLE_NOT_SEEN", "the engine does not tell the new role")

    async def _scale(self, size: int) -> None:
        await self._engine.post("/scale_elastic_ep", body={"new_ep_size": size})
        while True:
            with told():
                answer = await self._engine.http.read("/is_scaling_elastic_ep")
                scaling = bool(field_of(answer, "is_scaling_elastic_ep", bool))
                reached = int(field_of(answer, "effective_ep_size", int))
            if not scaling:
                break
            await asyncio.sleep(_LOOK_S)
        if reached != size:
            raise RuntimeFault("SCALE_NOT_SEEN", "the engine has not as many ranks as ordered")

    async def _as_before(self) -> bool:
        """A refusal may come before anything is torn down, or behind it."""
        role = (await self._engine.read_model()).role
        return role == self._before.role

    async def undo(self) -> None:
        if self._safe:
            return
        raise RuntimeFault("NOT_UNDONE", "the engine's shape is not for sure the old one")

    async def conclude(self) -> Conclusion:
        found = self._before
        if self._role is not None:
            self._engine.found = replace(found, role=self._engine.role)
        elif self._size is not None:
            more = self._size * found.world_size // found.data_parallel_size
            self._engine.found = replace(found, data_parallel_size=self._size, world_size=more)
        return Conclusion()
