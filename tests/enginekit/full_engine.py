"""The scripted engine with all that a runtime may offer, each rank with a state of its own.

A rank's weights are a version, its memory a number of bytes per resource; what two ranks say can
therefore differ, as it may in life.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

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
from app.domain.facts import LoraFact
from app.domain.kinds import (
    CacheKind,
    CachePolicy,
    Component,
    ContentPolicy,
    EngineRole,
    OperationKind,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightSourceKind,
)
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import (
    Conclusion,
    EngineDescription,
    Flushed,
    Observation,
    Order,
    ProfileArtifact,
    RankBytes,
    RankEvidence,
    RequestRefused,
    RuntimeFault,
    SwitchedRequest,
)
from app.rpc.openengine.v1 import error_pb2, kv_pb2
from tests.enginekit.minimal_engine import MinimalEngine

BYTES = {
    ResourceKind.WEIGHTS: 1000,
    ResourceKind.KV_CACHE: 500,
    ResourceKind.EXECUTION_GRAPHS: 20,
}


@dataclass(frozen=True, slots=True)
class RankState:
    version: str = "v1"
    released: frozenset[ResourceKind] = frozenset()
    loras: tuple[LoraFact, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    role: EngineRole = EngineRole.AGGREGATED
    max_running_requests: int = 32
    max_batched_tokens: int = 512


class FullEngine(MinimalEngine):
    """`held[rank]` is what each rank has now. `recorded` lists what became of profiles."""

    def __init__(self, *, world_size: int = 1, **options: Any) -> None:
        super().__init__(world_size=world_size, **options)
        self.held = dict.fromkeys(self.ranks, RankState())
        self.frozen_view: Observation | None = None  # what it goes on saying, whatever it does
        self.confirms: frozenset[Component] | None = None  # components, where it can't for all
        self.silent: set[int] = set()  # ranks without evidence
        self.prepared: dict[tuple[str, int], str] = {}
        self.shape = Shape()
        self.most_loras = 8  # one more evicts the first
        self.stubborn = False  # it says that it was reconfigured, and was not
        self.steps_done = asyncio.Event()
        self.recorded: list[str] = []
        self.profiling: dict[str, Callable[[], Awaitable[None]]] = {}  # by start, profiled, finish
        self.kv_told = 0
        self.kv_closed = asyncio.Event()
        self._shapes: dict[str, tuple[Shape, tuple[int, ...]]] = {}
        self._earlier: dict[tuple[str, int], RankState] = {}
        self._lean = self.offered
        self.offered = Capabilities(
            operations=self._lean.operations
            | {
                OperationKind.RELEASE_RESOURCES,
                OperationKind.RESTORE_RESOURCES,
                OperationKind.UPDATE_WEIGHTS,
                OperationKind.PROFILE,
                OperationKind.RECONFIGURE_SERVING,
                OperationKind.LOAD_LORA,
                OperationKind.UNLOAD_LORA,
            },
            cancellable=frozenset({OperationKind.UPDATE_WEIGHTS, OperationKind.PROFILE}),
            profiler_kinds=frozenset(ProfilerKind),
            reconfigurable=frozenset(ReconfigurableField)
            - {ReconfigurableField.DATA_PARALLEL_SIZE},
            weight_sources=frozenset(WeightSourceKind),
            weight_sessions=frozenset({"disk"}),
            cache_policies=frozenset(CachePolicy),
            components=frozenset({Component.TARGET, Component.DRAFT}),
            cache_kinds=frozenset({CacheKind.PREFIX}),
            pause_modes=frozenset(PauseMode),
            resources=dict.fromkeys(ResourceKind, frozenset(ContentPolicy)),
        )

    async def observe(self) -> Observation:
        seen = await super().observe()
        if self.frozen_view is not None:
            return self.frozen_view
        first = self.held[0]
        return replace(
            seen,
            weights=replace(seen.weights, version=first.version),
            released=first.released,
            role=self.shape.role,
            loras=first.loras,
        )

    def describe(self) -> EngineDescription:
        return replace(
            super().describe(),
            max_running_requests=self.shape.max_running_requests,
            max_batched_tokens=self.shape.max_batched_tokens,
        )

    async def prepare(self, order: Order, rank: int) -> None:
        await super().prepare(order, rank)
        match order.command:
            case UpdateWeights(weight_version=version, source=DiskWeights(path=path)):
                if path == "/part" and order.replace_all:
                    raise RuntimeFault("PARTIAL_UPDATE", "some parameters are not there")
                self.prepared[order.operation_id, rank] = version
            case UpdateWeights(weight_version=version):
                self.prepared[order.operation_id, rank] = version

    async def commit(self, order: Order, rank: int) -> None:
        await super().commit(order, rank)
        before = self.held[rank]
        match order.command:
            case ReleaseResources(resources=kinds):
                after = replace(before, released=before.released | set(kinds))
            case RestoreResources(resources=kinds):
                after = replace(before, released=before.released - set(kinds))
            case LoadLora(name=name, path=path, id=number):
                lora = LoraFact(name, number or len(before.loras) + 1, path)
                after = replace(before, loras=(*before.loras, lora)[-self.most_loras :])
            case UnloadLora(name=name):
                left = tuple(lora for lora in before.loras if lora.name != name)
                after = replace(before, loras=left)
            case UpdateWeights(cache_policy=policy):
                after = replace(before, version=self.prepared.pop((order.operation_id, rank)))
                if policy is CachePolicy.FLUSH:
                    self.cached_blocks = 0
            case _:
                return
        self._earlier[order.operation_id, rank] = before
        self.held[rank] = after

    async def rollback(self, order: Order, rank: int) -> None:
        await super().rollback(order, rank)
        self.prepared.pop((order.operation_id, rank), None)
        before = self._earlier.pop((order.operation_id, rank), None)
        if before is not None:
            self.held[rank] = before

    async def conclude(self, order: Order) -> Conclusion:
        match order.command:
            case ReleaseResources(resources=kinds):
                concluded = Conclusion(memory=self._memory(kinds, given_back=True))
            case RestoreResources(resources=kinds):
                concluded = Conclusion(memory=self._memory(kinds, given_back=False))
            case UpdateWeights(cache_policy=policy):
                flushed = (Flushed(CacheKind.PREFIX, 3, 0),)
                concluded = Conclusion(
                    evidence=self.evidence(),
                    components=self.confirms,
                    flushed=flushed if policy is CachePolicy.FLUSH else (),
                    switched=(SwitchedRequest("frozen", 5),),
                )
            case ReconfigureServing():
                await self._step("conclude", order, -1)
                return self._reshaped(order.command)
            case LoadLora(name=name):
                concluded = Conclusion(
                    lora=next(lora for lora in self.held[0].loras if lora.name == name),
                    evicted=tuple(
                        lora
                        for lora in self._earlier[order.operation_id, 0].loras
                        if lora not in self.held[0].loras
                    ),
                )
            case UnloadLora():
                concluded = Conclusion()
            case _:
                return await super().conclude(order)
        await self._step("conclude", order, -1)
        for rank in self.ranks:
            self._earlier.pop((order.operation_id, rank), None)
        return concluded

    def _reshaped(self, command: ReconfigureServing) -> Conclusion:
        if not self.stubborn:
            self.shape = Shape(
                role=command.role or self.shape.role,
                max_running_requests=command.max_running_requests
                or self.shape.max_running_requests,
                max_batched_tokens=command.max_batched_tokens or self.shape.max_batched_tokens,
            )
            ranks = tuple(range(command.tensor_parallel_size or len(self.ranks)))
            self.held = {rank: self.held.get(rank, self.held[0]) for rank in ranks}
            self.ranks = ranks
        return Conclusion()

    # ---- profiles ----

    async def start_profile(self, profile_id: str, command: StartProfile) -> None:
        await self._profile_step("start")
        self.recorded.append(f"started {command.profiler.value}")

    async def profiled(self, profile_id: str) -> None:
        await self._profile_step("profiled")
        await self.steps_done.wait()

    async def finish_profile(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        self.recorded.append("finished")
        await self._profile_step("finish")
        return tuple(
            ProfileArtifact(
                rank,
                f"{profile_id}/rank{rank}.json",
                9,
                checksum(rank, "trace"),
                "application/json",
            )
            for rank in self.ranks
        )

    async def drop_profile(self, profile_id: str) -> None:
        self.recorded.append("dropped")
        await self._profile_step("drop")

    async def _profile_step(self, name: str) -> None:
        if name in self.profiling:
            await self.profiling[name]()

    # ---- cache events ----

    async def kv_event_sources(
        self, request: kv_pb2.GetKvEventSourcesRequest
    ) -> kv_pb2.GetKvEventSourcesResponse:
        ranks = list(request.data_parallel_ranks) or [0]
        return kv_pb2.GetKvEventSourcesResponse(
            sources=[kv_pb2.KvEventSource(transport="grpc", data_parallel_rank=r) for r in ranks]
        )

    async def kv_events(
        self, request: kv_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
        if request.start_sequence_number > 100:
            raise RequestRefused(error_pb2.ERROR_CODE_INVALID_ARGUMENT, "too far back")
        try:
            while True:
                self.kv_told += 1
                batch = kv_pb2.KvEventBatch(sequence_number=self.kv_told)
                yield kv_pb2.SubscribeKvEventsResponse(batch=batch)
                await asyncio.sleep(0.01)
        finally:
            self.kv_closed.set()

    def evidence(self) -> tuple[RankEvidence, ...]:
        return tuple(
            RankEvidence(rank, 7, 1000, checksum(rank, self.held[rank].version))
            for rank in self.ranks
            if rank not in self.silent
        )

    def _memory(
        self, kinds: tuple[ResourceKind, ...], *, given_back: bool
    ) -> tuple[RankBytes, ...]:
        return tuple(
            RankBytes(rank, kind, BYTES[kind], 0)
            if given_back
            else RankBytes(rank, kind, 0, BYTES[kind])
            for rank in self.ranks
            for kind in kinds
        )


def checksum(rank: int, version: str) -> bytes:
    return hashlib.sha256(f"{rank} {version}".encode()).digest()
