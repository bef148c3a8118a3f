"""LoRA adapters, by their names."""

from __future__ import annotations

import asyncio
from pathlib import Path

from app.domain.commands import LoadLora, UnloadLora
from app.domain.facts import LoraFact
from app.domain.kinds import PauseMode
from app.domain.operation import OperationWarning
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.adapter_files import adapter_fits
from app.sidecars.adapters import has_room, may_be_named
from app.sidecars.allowed import all_below
from app.sidecars.carried import Carried
from app.sidecars.checkpoints import folder_of
from app.sidecars.faults import refused, remaining_s, told
from app.sidecars.safetensors import BadWeights
from app.sidecars.sglang.answers import adapters_after
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.streams import Streams

COMES_BACK = OperationWarning(
    "LORA_COMES_BACK",
    "the engine remembers where the adapter was, and loads it again for a request that names it",
)


class CarriedLoad(Carried):
    """One more than the engine has room for would push another out without a word, so that it is
    refused."""

    def __init__(self, order: Order, command: LoadLora, engine: SglangEngine) -> None:
        super().__init__(order)
        self._command = command
        self._engine = engine
        self._path = command.path

    async def prepare(self) -> None:
        command, engine = self._command, self._engine
        may_be_named(command, engine.belief.models)
        if ":" in command.name:
            raise RuntimeFault(
                "LORA_NAME_NOT_OFFERED",
                "requests of this engine name adapters behind a colon: leave it out",
                code="INVALID_ARGUMENT",
            )
        self._path = str(await asyncio.to_thread(self._looked_at))
        await engine.same()
        names = set(await engine.adapters())
        has_room(engine.found.lora_slots, names, command.name)

    def _looked_at(self) -> Path:
        """What does not fit is loaded without a word, and ends the engine with the first request
        for it. Blocks on the disk. Raises RuntimeFault."""
        path = all_below(self._engine.allowed.lora_roots, self._command.path)
        model = folder_of(self._engine.belief.root)
        if model is None:
            raise refused(
                "MODEL_NOT_SEEN", "the files of the engine's model are not seen from here"
            )
        try:
            adapter_fits(path, model)
        except BadWeights as error:
            raise RuntimeFault("LORA_UNFIT", str(error), code="INVALID_ARGUMENT") from error
        return path

    async def commit(self) -> None:
        self._path = str(await asyncio.to_thread(self._looked_at))  # it may have been changed since
        self.sent = True
        answer = await self._engine.post(
            "/load_lora_adapter",
            body={"lora_name": self._command.name, "lora_path": self._path, "pinned": False},
            within_s=remaining_s(self.order.deadline_at),
        )
        with told():
            loaded = adapters_after(answer)
        if self._command.name not in loaded or self._command.name not in await self._names():
            raise RuntimeFault("LORA_NOT_SEEN", "the engine does not list the adapter")

    async def _names(self) -> set[str]:
        return set(await self._engine.adapters())

    async def undo(self) -> None:
        if self._command.name in await self._names():
            body = {"lora_name": self._command.name}
            await self._engine.post("/unload_lora_adapter", body=body)

    async def conclude(self) -> Conclusion:
        name = self._command.name
        return Conclusion(lora=LoraFact(name, self._engine.number_of(name), self._path))


class CarriedUnload(Carried):
    """The engine waits for requests under the adapter, and none ends while they are frozen."""

    def __init__(
        self, order: Order, command: UnloadLora, engine: SglangEngine, streams: Streams
    ) -> None:
        super().__init__(order)
        self._name = command.name
        self._engine = engine
        self._streams = streams

    async def prepare(self) -> None:
        engine = self._engine
        await engine.same()
        frozen = engine.belief.paused is PauseMode.KEEP
        in_flight = (await engine.loads()).in_flight if frozen else 0
        if frozen and (in_flight or self._streams.running):
            raise RuntimeFault(
                "LORA_IN_USE", "frozen requests may run under this adapter", retryable=True
            )

    async def commit(self) -> None:
        self.sent = True
        answer = await self._engine.post(
            "/unload_lora_adapter",
            body={"lora_name": self._name},
            within_s=remaining_s(self.order.deadline_at),
        )
        with told():
            left = adapters_after(answer)
        if self._name in left or self._name in await self._engine.adapters():
            raise RuntimeFault("UNLOAD_NOT_SEEN", "the engine still lists the adapter")

    async def undo(self) -> None:
        if self._name not in await self._engine.adapters():
            raise RuntimeFault("NOT_UNDONE", "the adapter is unloaded, and not for sure everywhere")

    async def conclude(self) -> Conclusion:
        return Conclusion(warnings=(COMES_BACK,))
