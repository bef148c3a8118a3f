"""LoRA adapters, by their names."""

from __future__ import annotations

import asyncio

from app.domain.commands import LoadLora, UnloadLora
from app.domain.facts import LoraFact
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.allowed import all_below
from app.sidecars.dynamo.carried import WorkerOrder
from app.sidecars.dynamo.worker import DynamoWorker
from app.sidecars.faults import remaining_s

_ALREADY = "already"


class CarriedLoad(WorkerOrder):
    """A name that is taken is refused: the worker says that it has loaded it and goes on with what
    it had."""

    def __init__(self, order: Order, command: LoadLora, worker: DynamoWorker) -> None:
        super().__init__(order, worker)
        self._command = command
        self._path = command.path
        self._number = 0

    async def prepare(self) -> None:
        command, worker = self._command, self.worker
        if command.id:
            raise RuntimeFault(
                "LORA_ID_NOT_OFFERED", "the worker numbers its adapters", code="INVALID_ARGUMENT"
            )
        real = await asyncio.to_thread(all_below, worker.allowed.lora_roots, command.path)
        self._path = str(real)
        if command.name in worker.found.models or command.name in await worker.loras():
            raise RuntimeFault(
                "LORA_NAME_TAKEN", "a model or adapter has this name", code="ALREADY_EXISTS"
            )

    async def commit(self) -> None:
        worker, name = self.worker, self._command.name
        route = worker.found.routes.load_lora
        assert route is not None  # nothing else is offered
        body = {"lora_name": name, "source": {"uri": f"file://{self._path}"}}
        async with self.sending():
            said = await worker.order(route, body, within_s=remaining_s(self.order.deadline_at))
        if _ALREADY in str(said.get("message", "")):
            self.sent = False  # nor is theirs unloaded
            raise RuntimeFault(
                "LORA_NAME_TAKEN",
                "somebody else has loaded one of this name",
                code="ALREADY_EXISTS",
            )
        listed = await worker.loras()
        if name not in listed:
            raise RuntimeFault("LORA_NOT_SEEN", "the worker does not list the adapter")
        self._number = listed[name]
        worker.believe(worker.belief.came(name, self._path))

    async def undo(self) -> None:
        if self._command.name in await self.worker.loras():
            await unload(self.worker, self._command.name)

    async def conclude(self) -> Conclusion:
        return Conclusion(lora=LoraFact(self._command.name, self._number, self._path))


class CarriedUnload(WorkerOrder):
    """The worker waits for requests that run under the adapter, and takes no new ones."""

    def __init__(self, order: Order, command: UnloadLora, worker: DynamoWorker) -> None:
        super().__init__(order, worker)
        self._name = command.name

    async def commit(self) -> None:
        async with self.sending():
            left_s = remaining_s(self.order.deadline_at)
            await unload(self.worker, self._name, within_s=left_s)
        if self._name in await self.worker.loras():
            raise RuntimeFault("UNLOAD_NOT_SEEN", "the worker still lists the adapter")
        self.worker.believe(self.worker.belief.went(self._name))

    async def undo(self) -> None:
        if self._name not in await self.worker.loras():
            raise RuntimeFault("NOT_UNDONE", "the adapter is unloaded, and not for sure everywhere")


async def unload(worker: DynamoWorker, name: str, *, within_s: float | None = None) -> None:
    """Raises RuntimeFault."""
    route = worker.found.routes.unload_lora
    assert route is not None
    await worker.order(route, {"lora_name": name}, within_s=within_s)
