"""LoRA adapters, by their names."""

from __future__ import annotations

import asyncio

from app.domain.commands import LoadLora, UnloadLora
from app.domain.facts import LoraFact
from app.domain.operation import OperationWarning
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.adapters import has_room, may_be_named
from app.sidecars.allowed import all_below
from app.sidecars.answers import served_models
from app.sidecars.carried import Carried
from app.sidecars.faults import remaining_s, told
from app.sidecars.vllm.engine import VllmEngine

STAYS = OperationWarning(
    "LORA_STAYS_IN_MEMORY",
    "the engine takes no new requests for the adapter, and keeps its content until it needs room",
)


async def _names(engine: VllmEngine) -> frozenset[str]:
    with told():
        models = served_models(await engine.http.read("/v1/models"))
    return frozenset(model.name for model in models if model.parent is not None)


class CarriedLoad(Carried):
    """One more than the engine has room for would push another out without a word, so that it is
    refused."""

    def __init__(self, order: Order, command: LoadLora, engine: VllmEngine) -> None:
        super().__init__(order)
        self._command = command
        self._engine = engine
        self._path = command.path

    async def prepare(self) -> None:
        command, engine = self._command, self._engine
        may_be_named(command, engine.found.models)
        real = await asyncio.to_thread(all_below, engine.allowed.lora_roots, command.path)
        self._path = str(real)
        names = await _names(engine)
        has_room(engine.found.lora_slots, names, command.name)

    async def commit(self) -> None:
        self.sent = True
        await self._engine.post(
            "/v1/load_lora_adapter",
            body={"lora_name": self._command.name, "lora_path": self._path},
            within_s=remaining_s(self.order.deadline_at),
        )
        if self._command.name not in await _names(self._engine):
            raise RuntimeFault("LORA_NOT_SEEN", "the engine does not list the adapter")

    @property
    def _fact(self) -> LoraFact:
        name = self._command.name
        return LoraFact(name, self._engine.number_of(name), self._path)

    async def undo(self) -> None:
        if self._command.name in await _names(self._engine):
            body = {"lora_name": self._command.name}
            await self._engine.post("/v1/unload_lora_adapter", body=body)

    async def conclude(self) -> Conclusion:
        return Conclusion(lora=self._fact)


class CarriedUnload(Carried):
    """Refused while requests run under the adapter: vLLM would let it go from under them."""

    def __init__(self, order: Order, command: UnloadLora, engine: VllmEngine) -> None:
        super().__init__(order)
        self._name = command.name
        self._engine = engine

    async def prepare(self) -> None:
        if self._name in (await self._engine.metrics()).adapters_in_use():
            raise RuntimeFault("LORA_IN_USE", "requests run under this adapter", retryable=True)

    async def commit(self) -> None:
        self.sent = True
        await self._engine.post("/v1/unload_lora_adapter", body={"lora_name": self._name})
        if self._name in await _names(self._engine):
            raise RuntimeFault("UNLOAD_NOT_SEEN", "the engine still lists the adapter")

    async def undo(self) -> None:
        if self._name not in await _names(self._engine):
            raise RuntimeFault("NOT_UNDONE", "the adapter is unloaded, and not for sure everywhere")

    async def conclude(self) -> Conclusion:
        return Conclusion(warnings=(STAYS,))
