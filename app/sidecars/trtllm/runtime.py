"""TensorRT-LLM behind the administration kit's port: orders and requests to its HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator

from app.domain.capabilities import Capabilities
from app.domain.commands import Pause, ReleaseResources, RestoreResources, Resume
from app.domain.kinds import AbortOutcome
from app.enginekit.runtime import (
    AbortTally,
    EngineDescription,
    Load,
    Order,
    RuntimeFault,
)
from app.rpc.openengine.v1 import generation_pb2
from app.sidecars.carried import Carried
from app.sidecars.carrying import CarryingRuntime
from app.sidecars.http import CallError
from app.sidecars.streams import Streams
from app.sidecars.trtllm.completions import Completion
from app.sidecars.trtllm.engine import TrtllmEngine
from app.sidecars.trtllm.offer import capabilities_of, describe
from app.sidecars.trtllm.orders import (
    CarriedPause,
    CarriedRelease,
    CarriedRestore,
    CarriedResume,
)
from app.sidecars.trtllm.watching import TrtllmWatch

_PROBE_S = 10.0


class TrtllmRuntime(CarryingRuntime):
    """Implements ``app.enginekit.runtime.Runtime`` for one life of an engine. One rank stands for
    all of them: the server does not tell how many it has, and its answers are of all."""

    # What is parked is read, and so is a memory that failed: nothing else can be wrong with it.
    harmless = (CarriedPause, CarriedResume, CarriedRelease, CarriedRestore)

    def __init__(self, engine: TrtllmEngine, watch: TrtllmWatch) -> None:
        super().__init__(watch)
        self._engine = engine
        self._streams = Streams(engine.http, Completion, _no_such_call, lambda: "")

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,)

    def describe(self) -> EngineDescription:
        return describe(self._engine.found)

    def capabilities(self) -> Capabilities:
        return capabilities_of(self._engine.found, only_way=self._engine.only_way)

    async def load(self) -> Load:
        """Of what comes through here."""
        return Load(
            running_requests=len(self._streams.running),
            queued_requests=0,
            used_kv_blocks=0,
            total_kv_blocks=0,
        )

    def made(self, order: Order) -> Carried:
        match order.command:
            case Pause() as command:
                return CarriedPause(order, command, self._streams)
            case Resume():
                return CarriedResume(order)
            case ReleaseResources() as command:
                return CarriedRelease(order, command, self._engine)
            case RestoreResources() as command:
                return CarriedRestore(order, command, self._engine)
        raise RuntimeFault("UNSUPPORTED_OPERATION", f"{order.command.kind.value} is not offered")

    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        return self._streams.generate(request)

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        """Requests that came through here, by hanging up on them. The engine has no names for
        others, so that of those nothing can be ended."""
        if request_ids is None and not self._engine.only_way:
            raise RuntimeFault(
                "UNSUPPORTED_OPERATION",
                "this engine ends requests of its own listener alone: name them",
                code="UNIMPLEMENTED",
            )
        if request_ids is None:
            request_ids = tuple(one.request_id for one in self._streams.running)
        return AbortTally(await self._streams.abort(request_ids, message, _never_seen))

    async def probe(self) -> None:
        try:
            answer = await self._engine.http.get("/health_generate", within_s=_PROBE_S)
        except CallError as error:
            raise RuntimeFault("CANNOT_SERVE", error.message) from error
        if answer.status != 200:
            raise RuntimeFault("CANNOT_SERVE", "the engine's own probe did not come through")


async def _never_seen(_ids: list[str]) -> AbortOutcome:
    return AbortOutcome.NOT_FOUND


async def _no_such_call(_ids: list[str], _within_s: float) -> None:
    raise RuntimeFault("UNSUPPORTED_OPERATION", "the engine has no call that ends requests")
