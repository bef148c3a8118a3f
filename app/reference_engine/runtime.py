"""The engine behind the administration kit's port: orders to the ranks, requests to the core."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from uuid import uuid4

from app.domain.capabilities import Capabilities
from app.domain.commands import (
    LoadLora,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    StartProfile,
    UnloadLora,
    UpdateWeights,
)
from app.domain.facts import WeightsFact
from app.domain.kinds import (
    AbortOutcome,
    CacheKind,
    CachePolicy,
    Component,
    ContentPolicy,
    EngineRole,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    WeightSourceKind,
    WeightsState,
    WeightTransferBackend,
)
from app.domain.ranks import RankReport, RankState
from app.domain.weight_sessions import Chunk, SessionWeights
from app.enginekit.runtime import (
    AbortTally,
    Conclusion,
    EngineDescription,
    Feature,
    Load,
    Observation,
    Order,
    ProfileArtifact,
    RankLoad,
    RankMemory,
    RuntimeFault,
)
from app.reference_engine import messages as m
from app.reference_engine.adapter_sources import AdapterPolicy
from app.reference_engine.cache_feed import feed_of
from app.reference_engine.carried_adapter import CarriedAdapter, fact_of
from app.reference_engine.carried_change import CarriedChange, ChangeCommand, fault_of
from app.reference_engine.carried_order import CarriedOrder
from app.reference_engine.engine import Engine
from app.reference_engine.errors import (
    InvalidRequest,
    OrderRejected,
    RankLost,
)
from app.reference_engine.generating import Generating, refusal_of
from app.reference_engine.handoff import Handoff, HandoffSettings
from app.reference_engine.intake import MAX_TOP_LOGPROBS, Intake
from app.reference_engine.pieced_change import PiecedChange
from app.reference_engine.profiling import Profiling
from app.reference_engine.reshaping import FIELDS, Reshaping
from app.reference_engine.sources import SourcePolicy
from app.rpc.openengine.v1 import generation_pb2, kv_pb2

_ABORT_OUTCOMES = {
    m.AbortStatus.ABORTED: AbortOutcome.ABORTED,
    m.AbortStatus.ALREADY_FINISHED: AbortOutcome.ALREADY_FINISHED,
    m.AbortStatus.NOT_FOUND: AbortOutcome.NOT_FOUND,
}
_Changing = CarriedChange | CarriedAdapter | Reshaping
_CHANGES = (
    OperationKind.RELEASE_RESOURCES,
    OperationKind.RESTORE_RESOURCES,
    OperationKind.UPDATE_WEIGHTS,
    OperationKind.RECONFIGURE_SERVING,
)
_ADAPTER_ORDERS = frozenset({OperationKind.LOAD_LORA, OperationKind.UNLOAD_LORA})


class ReferenceRuntime:
    """Implements ``app.enginekit.runtime.Runtime``. Lives on one event loop."""

    def __init__(
        self,
        engine: Engine,
        intake: Intake,
        *,
        model_name: str,
        engine_version: str,
        weight_version: str | None,
        sources: SourcePolicy | None = None,
        adapters: AdapterPolicy | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        profiling: Profiling | None = None,
        handoff: HandoffSettings | None = None,
        role: EngineRole = EngineRole.AGGREGATED,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self._engine = engine
        self._intake = intake
        self._model_name = model_name
        self._engine_version = engine_version
        self._weight_version = weight_version
        self._gate = m.Gate.OPEN
        self._sources = sources or SourcePolicy()
        self._profiling = profiling
        self._adapters = adapters or AdapterPolicy()
        self._carried: CarriedOrder | None = None
        self._changing: _Changing | None = None
        self._cache = feed_of(engine, now_ns)
        self._handoff = Handoff(
            engine,
            handoff or HandoffSettings(),
            weight_version=lambda: self._weight_version,
            new_id=new_id,
        )
        self._generating = Generating(engine, intake, self._handoff, role)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._engine.ranks

    @property
    def gate(self) -> m.Gate:
        """What the ranks' gate has to be: as of the last order that all ranks have carried out."""
        return self._gate

    def describe(self) -> EngineDescription:
        ready, settings = self._engine.ready, self._engine.settings
        return EngineDescription(
            name="chadburn-reference",
            version=self._engine_version,
            models=(self._model_name,),
            tensor_parallel_size=settings.tensor_parallel_size,
            kv_block_size=settings.block_size,
            total_kv_blocks=ready.total_kv_blocks,
            max_running_requests=settings.max_running,
            max_batched_tokens=settings.max_batched_tokens,
            max_context_length=ready.max_model_len,
            max_output_tokens=ready.max_model_len - 1,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            max_loras=self._adapters.most if self._adapters.roots else None,
            features=frozenset(
                {
                    Feature.MIN_P,
                    Feature.FREQUENCY_PENALTY,
                    Feature.PRESENCE_PENALTY,
                    Feature.REPETITION_PENALTY,
                    Feature.OUTPUT_LOGPROBS,
                    Feature.PREFIX_CACHE_BYPASS,
                    Feature.CACHE_SALT,
                    Feature.KV_SESSION,
                }
            )
            | ({Feature.LORA} if self._adapters.roots else set()),
        )

    def capabilities(self) -> Capabilities:
        profiles = {OperationKind.PROFILE} if self._profiling is not None else set()
        return Capabilities(
            operations=frozenset(
                {
                    OperationKind.FLUSH_CACHES,
                    OperationKind.PAUSE,
                    OperationKind.RESUME,
                    OperationKind.ABORT_REQUESTS,
                    OperationKind.RECONFIGURE_SERVING,
                    *_CHANGES,
                    *profiles,
                }
            )
            | (_ADAPTER_ORDERS if self._adapters.roots else frozenset()),
            cancellable=frozenset({OperationKind.PAUSE, *_CHANGES, *profiles}),
            profiler_kinds=frozenset() if self._profiling is None else self._profiling.kinds,
            cache_kinds=frozenset({CacheKind.PREFIX}),
            resources={
                ResourceKind.WEIGHTS: frozenset(ContentPolicy),
                ResourceKind.KV_CACHE: frozenset(ContentPolicy),
            },
            weight_sources=frozenset(
                {WeightSourceKind.INLINE, WeightSourceKind.SHARED_MEMORY, WeightSourceKind.SESSION}
            )
            | ({WeightSourceKind.DISK} if self._sources.roots else set())
            | ({WeightSourceKind.DISTRIBUTED} if self._sources.rendezvous_rules else set()),
            weight_sessions=frozenset({WeightTransferBackend.IPC})
            | ({WeightTransferBackend.DISK} if self._sources.roots else set())
            | ({WeightTransferBackend.NCCL} if self._sources.rendezvous_rules else set()),
            cache_policies=frozenset(CachePolicy),
            components=frozenset({Component.TARGET}),
            pause_modes=frozenset(PauseMode),
            reconfigurable=FIELDS,
            new_requests=frozenset(NewRequests),
            models=(self._model_name,),
            world_size=len(self._engine.ranks),
        )

    async def observe(self) -> Observation:
        lost, held = self._engine.lost, self._engine.holdings
        state = WeightsState.UNKNOWN if lost else WeightsState.VALID
        if held.weights_missing:
            state = WeightsState.MISSING
        return Observation(
            weights=WeightsFact(version=self._weight_version, state=state),
            released=frozenset(ResourceKind(resource.value) for resource in held.released),
            role=self._generating.role,
            loras=tuple(fact_of(adapter) for adapter in held.adapters),
            ranks=tuple(
                RankReport(rank, RankState.FAILED, cause) for rank, cause in sorted(lost.items())
            ),
            group=self._engine.group.number,
        )

    async def moved(self) -> None:
        await self._engine.moved()

    async def load(self) -> Load:
        try:
            now, memory = await self._engine.load_and_memory()
        except RankLost as error:
            raise fault_of(error) from error
        rank = RankLoad(
            data_parallel_rank=0,
            running_requests=now.running_requests,
            queued_requests=now.waiting_requests,
            used_kv_blocks=now.used_kv_blocks,
            total_kv_blocks=now.total_kv_blocks,
            prefill_batch_size=now.prefill_batch_size,
            decode_batch_size=now.decode_batch_size,
        )
        return Load(
            running_requests=now.running_requests,
            queued_requests=now.waiting_requests,
            used_kv_blocks=now.used_kv_blocks,
            total_kv_blocks=now.total_kv_blocks,
            running_tokens=now.running_tokens,
            waiting_tokens=now.waiting_tokens,
            prefill_batch_size=now.prefill_batch_size,
            decode_batch_size=now.decode_batch_size,
            active_kv_sessions=self._handoff.sessions,
            ranks=(rank,),
            memory=tuple(
                RankMemory(
                    rank=number,
                    weights_bytes=one.weights,
                    kv_cache_bytes=one.kv_cache,
                    kept_bytes=one.kept,
                    in_use_bytes=one.in_use,
                )
                for number, one in enumerate(memory)
            ),
        )

    async def open_session(self, order: Order, rank: int) -> None:
        await self._pieced(order).open(rank)

    async def stage_chunk(self, order: Order, rank: int, chunk: Chunk) -> None:
        await self._pieced(order).stage(rank, chunk)

    async def prepare(self, order: Order, rank: int) -> None:
        await self._carried_of(order).prepare(rank)

    async def commit(self, order: Order, rank: int) -> None:
        await self._carried_of(order).commit(rank)

    async def rollback(self, order: Order, rank: int) -> None:
        """Where that can not be proved the ranks are ended: the next group begins with what every
        rank has settled, so none can go on with something else than the others."""
        carried = self._carried_of(order)
        try:
            await carried.rollback(rank)
        except BaseException:  # being cancelled too: then the rank did not answer in time
            carried.group.give_up(rank, "an order could not be undone on it")
            raise

    async def conclude(self, order: Order) -> Conclusion:
        carried, command = self._carried_of(order), order.command
        try:
            return await carried.conclude()
        finally:
            # Also where it is cancelled behind that point: version and weights go together.
            if isinstance(command, UpdateWeights) and _settled(carried):
                self._weight_version = command.weight_version

    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        return self._generating.generate(request)

    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        try:
            aborted = await self._engine.abort(request_ids, message)
        except RankLost as error:
            raise fault_of(error) from error
        return AbortTally({one.request_id: _ABORT_OUTCOMES[one.status] for one in aborted.outcomes})

    def kv_connector(self) -> kv_pb2.KvConnectorInfo:
        return self._handoff.connector()

    async def abort_kv_session(
        self, session: kv_pb2.KvSessionRef, message: str, *, by_admin: bool
    ) -> AbortOutcome:
        try:
            return await self._handoff.abort(session, by_admin=by_admin, message=message)
        except RankLost as error:
            raise fault_of(error) from error
        except InvalidRequest as error:
            raise refusal_of(error) from error

    async def kv_event_sources(
        self, request: kv_pb2.GetKvEventSourcesRequest
    ) -> kv_pb2.GetKvEventSourcesResponse:
        return self._cache.sources(request)

    def kv_events(
        self, request: kv_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
        return self._cache.subscribe(request)

    async def probe(self) -> None:
        try:
            await self._engine.probe()
        except (RankLost, OrderRejected) as error:
            raise fault_of(error) from error

    async def start_profile(self, profile_id: str, command: StartProfile) -> None:
        await self._profiles.start(profile_id, command)

    async def profiled(self, profile_id: str) -> None:
        await self._profiles.over(profile_id)

    async def finish_profile(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        return await self._profiles.finish(profile_id)

    async def drop_profile(self, profile_id: str) -> None:
        await self._profiles.drop(profile_id)

    async def open(self) -> None:
        """Once, before it serves: what its role needs. Raises RuntimeFault."""
        await self._generating.prepare(self._generating.role)

    async def close(self) -> None:
        await self._handoff.close()
        await self._engine.close()
        if self._profiling is not None:
            await self._profiling.close()
        if self._changing is not None:
            await self._changing.discard()

    @property
    def _profiles(self) -> Profiling:
        if self._profiling is None:
            raise RuntimeFault("UNSUPPORTED_OPERATION", "this engine records no profiles")
        return self._profiling

    def _carried_of(self, order: Order) -> _Changing | CarriedOrder:
        """Orders that reach the ranks exclude each other, so there is one at a time; beside it only
        the order that has this pause of its own."""
        change = self._change_of(order)
        if change is not None:
            return change
        if self._carried is None or self._carried.operation_id != order.operation_id:
            self._carried = CarriedOrder(
                order.operation_id, order.command, self._engine, self._gate, self._took_gate
            )
        return self._carried

    def _took_gate(self, gate: m.Gate) -> None:
        self._gate = gate

    def _change_of(self, order: Order) -> _Changing | None:
        if self._changing is not None and self._changing.operation_id == order.operation_id:
            return self._changing
        match order.command:
            case LoadLora() | UnloadLora() as command:
                self._changing = CarriedAdapter(
                    order.operation_id, command, self._engine, self._adapters
                )
            case ReconfigureServing() as command:
                self._changing = Reshaping(
                    order, command, self._engine, lambda: self._gate, self._generating
                )
            case ReleaseResources() | RestoreResources() | UpdateWeights() as command:
                self._changing = self._change_for(order, command)
            case _:
                return None
        return self._changing

    def _change_for(self, order: Order, command: ChangeCommand) -> CarriedChange:
        if isinstance(command, UpdateWeights) and isinstance(command.source, SessionWeights):
            return PiecedChange(order, command, command.source, self._engine, self._sources)
        return CarriedChange(order, command, self._engine, self._sources)

    def _pieced(self, order: Order) -> PiecedChange:
        change = self._change_of(order)
        if not isinstance(change, PiecedChange):
            raise RuntimeFault("INTERNAL", "the order does not come in pieces")
        return change


def _settled(carried: _Changing | CarriedOrder) -> bool:
    return isinstance(carried, CarriedChange) and carried.settled
