"""SGLang behind the administration kit's port: orders and requests to its HTTP server."""

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
from app.domain.engine_payloads import EnginePayloadTransfer
from app.domain.kinds import OperationKind
from app.domain.weight_sessions import Chunk, NcclTransfer, SessionWeights
from app.domain.weight_sources import (
    DiskWeights,
    DistributedWeights,
    InlineWeights,
    SharedMemoryWeights,
)
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
from app.rpc.openengine.v1 import error_pb2, generation_pb2
from app.sidecars.carried import Carried
from app.sidecars.carrying import CarryingRuntime, summed
from app.sidecars.sglang.aborting import abort, abort_all
from app.sidecars.sglang.adapter_orders import CarriedLoad, CarriedUnload
from app.sidecars.sglang.answers import Loads
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.sglang.generating import Generation, probe
from app.sidecars.sglang.group_orders import CarriedBroadcast, CarriedSession
from app.sidecars.sglang.joining import join_group
from app.sidecars.sglang.memory_orders import CarriedRelease, CarriedRestore
from app.sidecars.sglang.offer import Offer
from app.sidecars.sglang.payload_orders import CarriedPayloads
from app.sidecars.sglang.profiling import Profiling
from app.sidecars.sglang.reconfiguring import CarriedReconfiguring
from app.sidecars.sglang.serving_orders import CarriedFlush, CarriedPause, CarriedResume
from app.sidecars.sglang.tensor_orders import CarriedTensors
from app.sidecars.sglang.watching import SglangWatch
from app.sidecars.sglang.weight_orders import CarriedFiles
from app.sidecars.streams import Streams

_PROBE_S = 10.0


def random_id() -> str:
    """All of one length: none is the beginning of another."""
    return f"sidecar-{uuid4().hex}"


class SglangRuntime(CarryingRuntime):
    """Implements ``app.enginekit.runtime.Runtime`` for one life of an engine."""

    harmless = (CarriedPause, CarriedResume, CarriedFlush, CarriedLoad, CarriedUnload)

    def __init__(
        self,
        engine: SglangEngine,
        watch: SglangWatch,
        offer: Offer,
        *,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        super().__init__(watch)
        self._engine = engine
        self._seen = watch
        self._offer = offer
        self._streams = Streams(engine.http, Generation, engine.end_requests, new_id)
        self._profiling = Profiling(engine, offer.profile_root, new_id)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self._engine.found.world_size))

    @property
    def offered(self) -> Offer:
        """A reconfiguration changes what was found."""
        offer, found = self._offer, self._engine.found
        return Offer(
            found=found,
            allowed=offer.allowed,
            models=offer.models,
            root=offer.root,
            profile_root=offer.profile_root,
        )

    def describe(self) -> EngineDescription:
        return self.offered.describe()

    def capabilities(self) -> Capabilities:
        return self.offered.capabilities()

    async def load(self) -> Load:
        return load_of(await self._engine.loads(), self._engine.found.page_size)

    async def others(self) -> int:
        return max(0, (await self._engine.loads()).in_flight - len(self._streams.running))

    # ---- orders ----

    async def open_session(self, order: Order, rank: int) -> None:
        await self.open_piecewise(order)

    async def stage_chunk(self, order: Order, rank: int, chunk: Chunk) -> None:
        await self.stage_piece(order, chunk)

    async def join_group(self, transfer: NcclTransfer) -> None:
        """As ``app.enginekit.group_calls.GroupRuntime`` has it."""
        await join_group(self._engine, transfer)

    def made(self, order: Order) -> Carried:
        engine, streams = self._engine, self._streams
        match order.command:
            case Pause() as command:
                return CarriedPause(order, command, engine, streams)
            case Resume():
                return CarriedResume(order, engine, streams)
            case FlushCaches() as command:
                return CarriedFlush(order, command, engine, streams)
            case ReleaseResources() as command:
                return CarriedRelease(order, command, engine)
            case RestoreResources() as command:
                return CarriedRestore(order, command, engine)
            case UpdateWeights() as command:
                return self._update(order, command)
            case LoadLora() as command:
                return CarriedLoad(order, command, engine)
            case UnloadLora() as command:
                return CarriedUnload(order, command, engine, streams)
            case ReconfigureServing() as command:
                return CarriedReconfiguring(order, command, engine)
        raise RuntimeFault("UNSUPPORTED_OPERATION", f"{order.command.kind.value} is not offered")

    def _update(self, order: Order, command: UpdateWeights) -> Carried:
        match command.source:
            case DiskWeights() as source:
                return CarriedFiles(order, command, self._engine, source)
            case InlineWeights() | SharedMemoryWeights() as source:
                return CarriedTensors(order, command, self._engine, source)
            case DistributedWeights() as way:
                return CarriedBroadcast(order, command, self._engine, way)
            case SessionWeights(transfer=NcclTransfer() as way):
                return CarriedSession(order, command, self._engine, way)
            case SessionWeights(transfer=EnginePayloadTransfer()):
                return CarriedPayloads(order, command, self._engine)
        raise RuntimeFault("UNSUPPORTED_OPERATION", "weights are not taken in this way")

    # ---- profiles ----

    async def start_profile(self, profile_id: str, command: StartProfile) -> None:
        await self._profiling.start(command)

    async def profiled(self, profile_id: str) -> None:
        await self._profiling.over()

    async def finish_profile(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        return await self._profiling.finish()

    async def drop_profile(self, profile_id: str) -> None:
        await self._profiling.drop()

    # ---- requests ----

    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """One that names an adapter which was unloaded would have the engine load it again."""
        if request.lora_name and request.lora_name not in self._seen.adapters:
            code = error_pb2.ErrorCode.ERROR_CODE_MODEL_NOT_FOUND
            raise RequestRefused(code, "the engine has no adapter of this name")
        return self._streams.generate(request)

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        if OperationKind.ABORT_REQUESTS not in self.capabilities().operations:
            raise RuntimeFault("UNSUPPORTED_OPERATION", "this engine aborts no requests")
        if request_ids is None:
            return await abort_all(self._engine, self._streams, message)
        return await abort(self._engine, self._streams, request_ids, message)

    async def probe(self) -> None:
        await probe(self._engine.http, _PROBE_S)


def load_of(found: Loads, page_size: int) -> Load:
    ranks = tuple(
        RankLoad(
            data_parallel_rank=one.dp_rank,
            running_requests=one.running,
            queued_requests=one.waiting,
            used_kv_blocks=-(-one.used_tokens // page_size),
            total_kv_blocks=one.total_tokens // page_size,
        )
        for one in found.ranks
    )
    return summed(ranks)
