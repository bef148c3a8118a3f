"""A Dynamo worker behind the administration kit's port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from app.domain.capabilities import Capabilities
from app.domain.commands import (
    FlushCaches,
    LoadLora,
    Pause,
    ReleaseResources,
    RestoreResources,
    Resume,
    UnloadLora,
    UpdateWeights,
)
from app.domain.kinds import AbortOutcome
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import (
    AbortTally,
    EngineDescription,
    Load,
    Order,
    RequestRefused,
    RuntimeFault,
)
from app.rpc.openengine.v1 import error_pb2, generation_pb2
from app.sidecars.carried import Carried
from app.sidecars.carrying import CarryingRuntime
from app.sidecars.dynamo.adapter_orders import CarriedLoad, CarriedUnload
from app.sidecars.dynamo.memory_orders import CarriedRelease, CarriedRestore
from app.sidecars.dynamo.offer import capabilities_of, describe
from app.sidecars.dynamo.serving_orders import CarriedFlush, CarriedPause, CarriedResume
from app.sidecars.dynamo.watching import DynamoWatch
from app.sidecars.dynamo.weight_orders import CarriedUpdate
from app.sidecars.dynamo.worker import DynamoWorker


class DynamoRuntime(CarryingRuntime):
    """Implements ``app.enginekit.runtime.Runtime`` for one life of a worker. Requests come to it by
    Dynamo's own plane, never through here."""

    # A sleep keeps the weights; whether it has come is noted, and so is one of unknown depth.
    harmless = (
        CarriedPause,
        CarriedResume,
        CarriedFlush,
        CarriedLoad,
        CarriedUnload,
        CarriedRelease,
        CarriedRestore,
    )

    def __init__(self, worker: DynamoWorker, watch: DynamoWatch, model_path: Path | None) -> None:
        super().__init__(watch)
        self._worker = worker
        self._model_path = model_path

    @property
    def ranks(self) -> tuple[int, ...]:
        """A worker answers for all of its own as one."""
        return (0,)

    def describe(self) -> EngineDescription:
        return describe(self._worker.found)

    def capabilities(self) -> Capabilities:
        return capabilities_of(self._worker.found, self._worker.allowed)

    async def load(self) -> Load:
        running = await self.others()
        return Load(
            running_requests=running, queued_requests=0, used_kv_blocks=0, total_kv_blocks=0
        )

    async def others(self) -> int:
        return (await self._worker.metrics()).in_flight or 0

    def made(self, order: Order) -> Carried:
        worker = self._worker
        match order.command:
            case Pause() | Resume() if worker.found.routes.pause is None:
                return Carried(order)  # of a release, for the gate alone: it closes by itself
            case Pause() as command:
                return CarriedPause(order, command, worker)
            case Resume():
                return CarriedResume(order, worker)
            case FlushCaches() as command:
                return CarriedFlush(order, command, worker)
            case ReleaseResources():
                return CarriedRelease(order, worker)
            case RestoreResources():
                return CarriedRestore(order, worker)
            case UpdateWeights(source=DiskWeights() as source) as command:
                return CarriedUpdate(order, command, worker, source, self._model_path)
            case LoadLora() as command:
                return CarriedLoad(order, command, worker)
            case UnloadLora() as command:
                return CarriedUnload(order, command, worker)
        raise RuntimeFault("UNSUPPORTED_OPERATION", f"{order.command.kind.value} is not offered")

    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        text = "requests go to Dynamo's frontend; this takes orders alone"
        raise RequestRefused(error_pb2.ErrorCode.ERROR_CODE_UNSUPPORTED_FEATURE, text)

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        """A worker says that it has ended whatever it was named."""
        route = self._worker.found.routes.abort
        if route is None:
            raise RuntimeFault("UNSUPPORTED_OPERATION", "this worker ends no requests by their ids")
        if request_ids is None:
            raise RuntimeFault(
                "ABORT_ALL_NOT_OFFERED",
                "a worker ends requests by their ids alone; pause with abort ends all",
                code="UNIMPLEMENTED",
            )
        if not await self.others():
            return AbortTally(dict.fromkeys(request_ids, AbortOutcome.NOT_FOUND))
        for request_id in request_ids:
            await self._worker.order(route, {"request_id": request_id})
        return AbortTally(dict.fromkeys(request_ids, AbortOutcome.UNVERIFIED))

    async def close(self) -> None:
        await super().close()
        await self._worker.let_go()

    async def probe(self) -> None:
        if not await self._worker.is_alive():
            raise RuntimeFault("CANNOT_SERVE", "the engine does not answer its worker")
