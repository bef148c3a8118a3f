"""A release, a restore or an update of weights, between the kit's port and the core."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import TypeVar

from app.domain.commands import ReleaseResources, RestoreResources, UpdateWeights
from app.domain.kinds import CacheKind, CachePolicy, ContentPolicy, ResourceKind
from app.domain.weight_sessions import SessionWeights
from app.enginekit.runtime import (
    Conclusion,
    Flushed,
    Order,
    RankBytes,
    RankEvidence,
    RuntimeFault,
    SwitchedRequest,
)
from app.reference_engine import change_orders as c
from app.reference_engine.change import Change, ChangeOutcome
from app.reference_engine.engine import Engine
from app.reference_engine.errors import OrderRejected, RankLost
from app.reference_engine.sources import SourcePolicy
from app.reference_engine.sourcing import Sourcing

T = TypeVar("T")
ChangeCommand = ReleaseResources | RestoreResources | UpdateWeights


def fault_of(error: RankLost | OrderRejected, *, retryable: bool = True) -> RuntimeFault:
    """As the kit wants it. `retryable`: whether an order that was rejected may do better later; if
    not, it is what it asks for that will not do. Ranks that were lost are started again."""
    if isinstance(error, RankLost):
        return RuntimeFault("RANK_LOST", str(error), retryable=True)
    code = None if retryable else "INVALID_ARGUMENT"
    return RuntimeFault("RANK_REJECTED", error.cause, retryable=retryable, code=code)


class CarriedChange:
    """One order's way through the ranks, which the kit goes rank by rank. It outlives a pause that
    is carried out between its preparation and its commit."""

    def __init__(
        self, order: Order, command: ChangeCommand, engine: Engine, policy: SourcePolicy
    ) -> None:
        """``command`` is the order's."""
        self.operation_id = order.operation_id
        self.group = engine.group  # the order ends with it
        self.settled = False
        self._command = command
        self._sourcing: Sourcing | None = None
        if isinstance(command, UpdateWeights) and not isinstance(command.source, SessionWeights):
            self._sourcing = Sourcing(command.source, order, engine, policy)
        self._change: Change | None = None

    async def prepare(self, rank: int) -> None:
        """Raises RuntimeFault, with nothing changed."""
        preparation = await self._preparation(rank)
        if self._change is None:
            self._change = self.group.change(preparation)
        await self._answer(self._change.prepare(rank))

    async def commit(self, rank: int) -> None:
        await self._answer(self._prepared().commit(rank))

    async def rollback(self, rank: int) -> None:
        try:
            if self._change is not None:
                await self._answer(self._change.rollback(rank))
        finally:
            await self.discard()

    async def conclude(self) -> Conclusion:
        outcome = await self._answer(self._prepared().conclude())
        self.settled = True
        await self.discard()
        if isinstance(self._command, UpdateWeights):
            return _updated(self._command, outcome)
        return Conclusion(memory=tuple(_memory(outcome)))

    async def discard(self) -> None:
        """Clear away what brought new weights; safe to repeat."""
        if self._sourcing is not None:
            await self._sourcing.discard()

    def _prepared(self) -> Change:
        if self._change is None:
            raise RuntimeFault("INTERNAL", "the order was not prepared")
        return self._change

    async def _preparation(self, rank: int) -> c.Preparation:
        match self._command:
            case ReleaseResources(resources=resources, content=content):
                return c.PrepareRelease(
                    change_id=self.operation_id,
                    resources=_resources(resources),
                    preserve=content is ContentPolicy.PRESERVE,
                )
            case RestoreResources(resources=resources):
                return c.PrepareRestore(
                    change_id=self.operation_id, resources=_resources(resources)
                )
            case UpdateWeights() as command:
                if self._sourcing is None:
                    raise TypeError("an update has a source")
                return c.PrepareUpdate(
                    change_id=self.operation_id,
                    source=await self._sourcing.source(rank),
                    flush=command.cache_policy is CachePolicy.FLUSH,
                    check_finite=command.check_finite,
                )

    async def _answer(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        except (RankLost, OrderRejected) as error:
            # The same bytes are refused again; what is in the way of a release goes away.
            again = not isinstance(self._command, UpdateWeights)
            raise fault_of(error, retryable=again) from error


def _resources(kinds: tuple[ResourceKind, ...]) -> tuple[c.Resource, ...]:
    return tuple(c.Resource(kind.value) for kind in kinds)


def _updated(command: UpdateWeights, outcome: ChangeOutcome) -> Conclusion:
    freed = Flushed(CacheKind.PREFIX, outcome.committed.blocks_freed, 0)
    return Conclusion(
        switched=tuple(
            SwitchedRequest(one.request_id, one.output_tokens) for one in outcome.committed.switched
        ),
        flushed=(freed,) if command.cache_policy is CachePolicy.FLUSH else (),
        evidence=tuple(
            RankEvidence(rank, new.tensors, new.bytes, bytes.fromhex(live.weights_sha256))
            for rank, (new, live) in enumerate(zip(outcome.prepared, outcome.settled, strict=True))
        ),
    )


def _memory(outcome: ChangeOutcome) -> Iterator[RankBytes]:
    """Only the whole of a process can be measured. Of what its tensors gave up, so much counts as
    still held as the process did not return, shared among the resources by their size."""
    for rank, one in enumerate(outcome.settled):
        returned = max(0, one.before_memory - one.after_memory)
        for part in one.parts:
            given_up = max(0, part.bytes_before - part.bytes_after)
            kept = max(0, given_up - returned * given_up // max(1, one.held))
            yield RankBytes(
                rank, ResourceKind(part.resource.value), part.bytes_before, part.bytes_after + kept
            )
