"""The scripted engine with all that a runtime may offer, each rank with a state of its own.

A rank's weights are a version, its memory a number of bytes per resource; what two ranks say can
therefore differ, as it may in life.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from app.domain.capabilities import Capabilities
from app.domain.commands import ReleaseResources, RestoreResources, UpdateWeights
from app.domain.kinds import (
    CacheKind,
    CachePolicy,
    Component,
    ContentPolicy,
    OperationKind,
    PauseMode,
    ResourceKind,
    WeightSourceKind,
)
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import (
    Conclusion,
    Flushed,
    Observation,
    Order,
    RankBytes,
    RankEvidence,
    RuntimeFault,
)
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


class FullEngine(MinimalEngine):
    """`held[rank]` is what each rank has now."""

    def __init__(self, *, world_size: int = 1, **options: Any) -> None:
        super().__init__(world_size=world_size, **options)
        self.held = dict.fromkeys(self.ranks, RankState())
        self.frozen_view: Observation | None = None  # what it goes on saying, whatever it does
        self.confirms: frozenset[Component] | None = None  # components, where it can't for all
        self.silent: set[int] = set()  # ranks without evidence
        self.prepared: dict[tuple[str, int], str] = {}
        self._earlier: dict[tuple[str, int], RankState] = {}
        self._lean = self.offered
        self.offered = Capabilities(
            operations=self._lean.operations
            | {
                OperationKind.RELEASE_RESOURCES,
                OperationKind.RESTORE_RESOURCES,
                OperationKind.UPDATE_WEIGHTS,
            },
            cancellable=frozenset({OperationKind.UPDATE_WEIGHTS}),
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
                )
            case _:
                return await super().conclude(order)
        await self._step("conclude", order, -1)
        for rank in self.ranks:
            self._earlier.pop((order.operation_id, rank), None)
        return concluded

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
