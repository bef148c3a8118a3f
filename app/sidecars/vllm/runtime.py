"""vLLM behind the administration kit's port: orders and requests to its HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from uuid import uuid4

from app.domain.capabilities import Capabilities
from app.domain.commands import (
    FlushCaches,
    LoadLora,
    Pause,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    Resume,
    StartProfile,
    UnloadLora,
    UpdateWeights,
)
from app.domain.kinds import OperationKind
from app.domain.weight_sessions import Chunk, NcclTransfer, SessionWeights
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import (
    AbortTally,
    EngineDescription,
    Load,
    Order,
    ProfileArtifact,
    RankLoad,
    RequestRefused,
    RuntimeFault,
)
from app.rpc.openengine.v1 import error_pb2, generation_pb2, kv_pb2
from app.sidecars.carried import Carried
from app.sidecars.carrying import CarryingRuntime, summed
from app.sidecars.faults import told
from app.sidecars.streams import Streams
from app.sidecars.vllm.aborting import abort, abort_all
from app.sidecars.vllm.adapter_orders import CarriedLoad, CarriedUnload
from app.sidecars.vllm.answers import Metrics
from app.sidecars.vllm.cache_sources import sources_of
from app.sidecars.vllm.completions import Completion, probe
from app.sidecars.vllm.engine import VllmEngine
from app.sidecars.vllm.memory_orders import CarriedRelease, CarriedRestore
from app.sidecars.vllm.offer import capabilities_of, describe
from app.sidecars.vllm.profiling import Profiling
from app.sidecars.vllm.scaling import CarriedScaling
from app.sidecars.vllm.serving_orders import CarriedFlush, CarriedPause, CarriedResume
from app.sidecars.vllm.watching import VllmWatch
from app.sidecars.vllm.weight_orders import CarriedFiles
from app.sidecars.vllm.weight_sessions import CarriedSession

_PROBE_S = 10.0


def random_id() -> str:
    return f"sidecar-{uuid4().hex}"


class VllmRuntime(CarryingRuntime):
    """Implements ``app.enginekit.runtime.Runtime`` for one life of an engine."""

    harmless = (CarriedPause, CarriedResume, CarriedFlush, CarriedLoad, CarriedUnload)

    def __init__(
        self, engine: VllmEngine, watch: VllmWatch, *, new_id: Callable[[], str] = random_id
    ) -> None:
        super().__init__(watch)
        self._engine = engine
        self._streams = Streams(engine.http, Completion, engine.end_requests, new_id)
        self._profiling = Profiling(engine)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self._engine.found.world_size))

    def describe(self) -> EngineDescription:
        return describe(self._engine.found, self._engine.allowed)

    def capabilities(self) -> Capabilities:
        return capabilities_of(self._engine.found, self._engine.allowed)

    async def load(self) -> Load:
        return load_of(await self._engine.metrics(), self._engine.found.total_blocks or 0)

    async def others(self) -> int:
        in_flight = (await self._engine.metrics()).in_flight or 0
        return max(0, in_flight - len(self._streams.running))

    # ---- orders ----

    async def open_session(self, order: Order, rank: int) -> None:
        await self.open_piecewise(order)

    async def stage_chunk(self, order: Order, rank: int, chunk: Chunk) -> None:
        await self.stage_piece(order, chunk)

    def made(self, order: Order) -> Carried:
        match order.command:
            case Pause() as command:
                return CarriedPause(order, command, self._engine, self._streams)
            case Resume():
                return CarriedResume(order, self._engine)
            case FlushCaches() as command:
                return CarriedFlush(order, command, self._engine)
            case ReleaseResources() as command:
                return CarriedRelease(order, command, self._engine)
            case RestoreResources() as command:
                return CarriedRestore(order, command, self._engine)
            case UpdateWeights(source=DiskWeights() as source) as command:
                return CarriedFiles(order, command, self._engine, source)
            case UpdateWeights(source=SessionWeights(transfer=NcclTransfer() as way)) as command:
                return CarriedSession(order, command, self._engine, way)
            case LoadLora() as command:
                return CarriedLoad(order, command, self._engine)
            case UnloadLora() as command:
                return CarriedUnload(order, command, self._engine)
            case ReconfigureServing() as command:
                return CarriedScaling(order, command, self._engine)
        raise RuntimeFault("UNSUPPORTED_OPERATION", f"{order.command.kind.value} is not offered")

    # ---- profiles ----

    async def start_profile(self, profile_id: str, command: StartProfile) -> None:
        await self._profiling.start(command)

    async def profiled(self, profile_id: str) -> None:
        await self._profiling.over()

    async def finish_profile(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        return await self._profiling.finish()

    async def drop_profile(self, profile_id: str) -> None:
        await self._profiling.drop()

    # ---- cache events ----

    async def kv_event_sources(
        self, request: kv_pb2.GetKvEventSourcesRequest
    ) -> kv_pb2.GetKvEventSourcesResponse:
        engine = self._engine
        if not engine.found.has("/kv_event_sources"):
            raise _no_events()
        with told():
            answer = await engine.http.read("/kv_event_sources")
            wanted = frozenset(request.data_parallel_ranks)
            sources = sources_of(answer, engine.http.url, wanted)
        if not sources and not wanted:
            raise _no_events()
        return kv_pb2.GetKvEventSourcesResponse(sources=sources)

    def kv_events(
        self, request: kv_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
        raise _no_events()

    # ---- requests ----

    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        return self._streams.generate(request)

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        if OperationKind.ABORT_REQUESTS not in self.capabilities().operations:
            raise RuntimeFault("UNSUPPORTED_OPERATION", "this engine aborts no requests")
        if request_ids is None:
            return await abort_all(self._engine, self._streams, message)
        return await abort(self._engine, self._streams, request_ids, message)

    async def probe(self) -> None:
        await probe(self._engine.http, self.describe().models[0], _PROBE_S)


def _no_events() -> RequestRefused:
    text = "cache events are had from the engine itself, where its sources say"
    return RequestRefused(error_pb2.ErrorCode.ERROR_CODE_UNSUPPORTED_FEATURE, text)


def load_of(metrics: Metrics, blocks: int) -> Load:
    """`blocks`: of one engine."""
    running = metrics.by_engine("vllm:num_requests_running")
    waiting = metrics.by_engine("vllm:num_requests_waiting")
    used = metrics.by_engine("vllm:kv_cache_usage_perc")
    ranks = tuple(
        RankLoad(
            data_parallel_rank=number,
            running_requests=int(running[number]),
            queued_requests=int(waiting.get(number, 0)),
            used_kv_blocks=round(used.get(number, 0.0) * blocks),
            total_kv_blocks=blocks,
        )
        for number in sorted(running)
    )
    return summed(ranks)
