"""A release, a restore or an update of weights, between the kit's port and the core."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from app.domain.commands import ReleaseResources, RestoreResources, UpdateWeights
from app.domain.kinds import CacheKind, CachePolicy, ContentPolicy, ResourceKind, TensorDtype
from app.domain.weight_sources import (
    DiskWeights,
    InlineTensor,
    InlineWeights,
    SharedMemoryWeights,
    WeightSource,
)
from app.enginekit.runtime import Conclusion, Flushed, RankBytes, RankEvidence, RuntimeFault
from app.reference_engine import change_orders as c
from app.reference_engine import sources
from app.reference_engine.change import Change, ChangeOutcome
from app.reference_engine.engine import Engine
from app.reference_engine.errors import CheckpointError, OrderRejected, RankLost, SourceRefused

log = logging.getLogger(__name__)
T = TypeVar("T")
ChangeCommand = ReleaseResources | RestoreResources | UpdateWeights

_SAFETENSORS = {
    TensorDtype.FLOAT64: "F64",
    TensorDtype.FLOAT32: "F32",
    TensorDtype.FLOAT16: "F16",
    TensorDtype.BFLOAT16: "BF16",
    TensorDtype.FLOAT8_E4M3FN: "F8_E4M3",
    TensorDtype.FLOAT8_E5M2: "F8_E5M2",
    TensorDtype.INT64: "I64",
    TensorDtype.INT32: "I32",
    TensorDtype.INT16: "I16",
    TensorDtype.INT8: "I8",
    TensorDtype.UINT8: "U8",
    TensorDtype.BOOL: "BOOL",
}


def fault_of(error: RankLost | OrderRejected, *, retryable: bool = True) -> RuntimeFault:
    """As the kit wants it. `retryable`: whether an order that was rejected may do better later."""
    if isinstance(error, RankLost):
        return RuntimeFault("RANK_LOST", str(error))
    return RuntimeFault("RANK_REJECTED", error.cause, retryable=retryable)


class CarriedChange:
    """One order's way through the ranks, which the kit goes rank by rank. It outlives a pause that
    is carried out between its preparation and its commit."""

    def __init__(
        self,
        operation_id: str,
        command: ChangeCommand,
        engine: Engine,
        policy: sources.SourcePolicy,
    ) -> None:
        self.operation_id = operation_id
        self._command = command
        self._engine = engine
        self._policy = policy
        self._source: asyncio.Task[c.DiskSource | c.SharedSource] | None = None
        self._change: Change | None = None

    async def prepare(self, rank: int) -> None:
        """Raises RuntimeFault, with nothing changed."""
        preparation = await self._preparation()
        if self._change is None:
            self._change = self._engine.change(preparation)
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
        await self.discard()
        if isinstance(self._command, UpdateWeights):
            return _updated(self._command, outcome)
        return Conclusion(memory=tuple(_memory(outcome)))

    async def discard(self) -> None:
        """Remove what an order with inline tensors has put into shared memory; safe to repeat."""
        command = self._command
        inline = isinstance(command, UpdateWeights) and isinstance(command.source, InlineWeights)
        if self._source is None or not inline:
            return
        await asyncio.wait({self._source})
        if self._source.cancelled() or self._source.exception() is not None:
            return  # nothing was put there, and `prepare` has told of it
        source = self._source.result()
        if isinstance(source, c.SharedSource):
            try:
                await asyncio.to_thread(sources.discard, source)
            except OSError:
                log.exception("a segment of inline tensors is left behind: %s", source.path)

    def _prepared(self) -> Change:
        if self._change is None:
            raise RuntimeFault("INTERNAL", "the order was not prepared")
        return self._change

    async def _preparation(self) -> c.Preparation:
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
                return c.PrepareUpdate(
                    change_id=self.operation_id,
                    source=await self._resolved(command.source),
                    flush=command.cache_policy is CachePolicy.FLUSH,
                    check_finite=command.check_finite,
                )

    async def _resolved(self, wanted: WeightSource) -> c.DiskSource | c.SharedSource:
        """Once for all ranks. Shielded: a thread goes on when its caller is cancelled, and what it
        leaves in shared memory has to be known to `discard`."""
        if self._source is None:
            work = asyncio.to_thread(_resolve, self._policy, wanted)
            self._source = asyncio.create_task(work, name="resolve weights")
        try:
            return await asyncio.shield(self._source)
        except (SourceRefused, CheckpointError) as error:
            raise RuntimeFault("SOURCE_REFUSED", str(error)) from error
        except OSError as error:
            raise RuntimeFault("SOURCE_UNREADABLE", error.strerror or "not readable") from error

    async def _answer(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        except (RankLost, OrderRejected) as error:
            # The same bytes are refused again; what is in the way of a release goes away.
            again = not isinstance(self._command, UpdateWeights)
            raise fault_of(error, retryable=again) from error


def _resources(kinds: tuple[ResourceKind, ...]) -> tuple[c.Resource, ...]:
    return tuple(c.Resource(kind.value) for kind in kinds)


def _resolve(policy: sources.SourcePolicy, wanted: WeightSource) -> c.DiskSource | c.SharedSource:
    """Blocks. Raises SourceRefused, CheckpointError or OSError."""
    match wanted:
        case DiskWeights(path=path, digests=digests):
            return policy.disk(path, {one.name: one.sha256 for one in digests})
        case SharedMemoryWeights():
            tensors = [
                c.SharedTensor(
                    one.spec.name, _SAFETENSORS[one.spec.dtype], one.spec.shape, one.offset_bytes
                )
                for one in wanted.tensors
            ]
            found = policy.shared(wanted.object_name, tensors)
            _check_segment(found, wanted)
            return found
        case InlineWeights(tensors=inline):
            return policy.inline([_carried(one) for one in inline])
    raise SourceRefused(f"weights from {wanted.kind.value} are not offered")


def _carried(one: InlineTensor) -> sources.InlineTensor:
    if one.data is None:
        raise SourceRefused(f"the content of tensor {one.spec.name!r} did not come with the order")
    spec = one.spec
    return sources.InlineTensor(spec.name, _SAFETENSORS[spec.dtype], spec.shape, one.data)


def _check_segment(found: c.SharedSource, wanted: SharedMemoryWeights) -> None:
    """Against mistakes, not against its writer: who may write to it owns this process."""
    with open(os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as segment:
        size = os.fstat(segment.fileno()).st_size
        if size != wanted.size_bytes:
            raise SourceRefused(f"the segment has {size} bytes, not {wanted.size_bytes}")
        if wanted.sha256 is None:
            return
        sha256 = hashlib.file_digest(segment, "sha256").hexdigest()
        if sha256 != wanted.sha256:
            raise SourceRefused(f"the segment's sha256 is {sha256}")


def _updated(command: UpdateWeights, outcome: ChangeOutcome) -> Conclusion:
    freed = Flushed(CacheKind.PREFIX, outcome.committed.blocks_freed, 0)
    return Conclusion(
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
