"""Where the new weights of one order are: found once for all ranks, and cleared away at the end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from app.domain.operation import Progress
from app.domain.tensors import TensorSpec
from app.domain.weight_sessions import NcclTransfer
from app.domain.weight_sources import (
    DiskWeights,
    DistributedWeights,
    InlineTensor,
    InlineWeights,
    SharedMemoryWeights,
    WeightSource,
)
from app.enginekit.runtime import Order, RuntimeFault
from app.enginekit.tensor_names import SAFETENSORS
from app.reference_engine import change_orders as c
from app.reference_engine import sources
from app.reference_engine.demanded import Demanded
from app.reference_engine.engine import Engine
from app.reference_engine.errors import (
    CheckpointError,
    RankLost,
    SourceRefused,
    TransferFailed,
)
from app.reference_engine.segments import hold
from app.reference_engine.transfer import transfer_by
from app.reference_engine.transfer_messages import GroupBackend, JoinGroup

log = logging.getLogger(__name__)
T = TypeVar("T")
Source = c.DiskSource | c.SharedSource

# Shorter than what the ranks' own deadline for a preparation is.
_LONGEST_TRANSFER_S = 1500.0
_MARGIN_S = 1.0


class Sourcing:
    """``wanted`` as the order says it. Nothing happens before the first call of ``source``."""

    def __init__(
        self, wanted: WeightSource, order: Order, engine: Engine, policy: sources.SourcePolicy
    ) -> None:
        self._wanted = wanted
        self._order = order
        self._engine = engine
        self._policy = policy
        self._own = OwnSegment()
        self._work: asyncio.Task[Source] | None = None

    async def source(self, rank: int) -> Source:
        """For that rank, and the same for all. Raises RuntimeFault.

        Shielded: a thread goes on when its caller is cancelled, and what it leaves in shared memory
        has to be known to ``discard``.
        """
        if self._work is None:
            self._work = asyncio.create_task(self._found(), name="find weights")
        with told_as_faults(self._engine, rank):
            return await asyncio.shield(self._work)

    async def discard(self) -> None:
        """Stop what still goes on, and remove what was put into shared memory; safe to repeat."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
            if not self._work.cancelled():
                self._work.exception()  # `source` has told of it
        await self._own.discard()

    async def _found(self) -> Source:
        match self._wanted:
            case DistributedWeights() as group:
                return await unless_lost(self._engine, self._received(group))
            case InlineWeights(tensors=tensors):
                carried = [_carried(one) for one in tensors]
                return await self._own.make(lambda: self._policy.inline(carried))
            case wanted:
                return await asyncio.to_thread(_resolve, self._policy, wanted)

    async def _received(self, group: DistributedWeights) -> c.SharedSource:
        """Every tensor is checked by what the order says of it before the group is joined."""
        tensors = to_be_received(group.tensors)
        forms = {one.name: (one.dtype, one.shape) for one in tensors}
        Demanded(self._engine.config).check(forms)
        address = await asyncio.to_thread(self._policy.rendezvous, group.address, group.port)
        give_up_at = gives_up_at(self._order)
        sizes = [spec.size_bytes for spec in group.tensors]
        own = await self._own.make(lambda: self._policy.room(tensors, sizes))
        join = joining(group, address, len(self._engine.ranks))
        self._tell("joining", 0)
        async with transfer_by(join) as transfer:
            await transfer.join(give_up_at)
            self._tell("receiving", 0)
            await transfer.receive(
                own.path,
                own.tensors,
                give_up_at,
                lambda count: self._tell("receiving", count),
            )
        return own

    def _tell(self, phase: str, done: int) -> None:
        if isinstance(self._wanted, DistributedWeights):
            total = len(self._wanted.tensors)
            self._order.report(Progress(phase, done=done, total=total, unit="tensors"))


class OwnSegment:
    """At most one at a time, of shared memory that this process has to remove."""

    def __init__(self) -> None:
        self._made: c.SharedSource | None = None
        self._held: int | None = None

    async def make(self, segment: Callable[[], c.SharedSource]) -> c.SharedSource:
        """In a thread, which a cancellation does not stop: it is waited for, or what it makes
        would be nobody's."""

        def make() -> c.SharedSource:
            self._made = made = segment()
            self._held = hold(made.path)
            return made

        making = asyncio.ensure_future(asyncio.to_thread(make))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait({making})
            making.exception()  # nobody is there any more to be told
            raise

    async def discard(self) -> None:
        """Safe to repeat."""
        if self._made is not None:
            made, self._made = self._made, None
            try:
                await asyncio.to_thread(sources.discard, made)
            except OSError:
                log.exception("a segment of tensors is left behind: %s", made.path)
        if self._held is not None:
            held, self._held = self._held, None
            os.close(held)


@contextlib.contextmanager
def told_as_faults(engine: Engine, rank: int) -> Iterator[None]:
    """What stands in the way of new weights, as the kit wants it of each rank."""
    try:
        yield
    except (SourceRefused, CheckpointError) as error:
        raise RuntimeFault("SOURCE_REFUSED", str(error), code="INVALID_ARGUMENT") from error
    except OSError as error:
        cause = error.strerror or "not readable"
        raise RuntimeFault("SOURCE_UNREADABLE", cause, code="FAILED_PRECONDITION") from error
    except TransferFailed as error:
        raise RuntimeFault("TRANSFER_FAILED", str(error), retryable=True) from error
    except RankLost as error:
        lost = RankLost((rank,), engine.lost.get(rank, error.cause))
        raise RuntimeFault("RANK_LOST", str(lost), retryable=True) from error


def gives_up_at(order: Order) -> float:
    """Before the kit interrupts the order without knowing what it waits for."""
    now = asyncio.get_running_loop().time()
    left = min(order.deadline_at - now, _LONGEST_TRANSFER_S)
    return now + left - min(_MARGIN_S, left / 5)


async def unless_lost(engine: Engine, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. Raises RankLost as soon as a rank is lost: it would be received for
    nobody."""
    task = asyncio.ensure_future(work)
    lost = asyncio.ensure_future(engine.until_lost())
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RankLost(engine.blamed, "while new weights were received")
    finally:
        for one in (task, lost):
            one.cancel()
        await asyncio.wait({task, lost})


def joining(group: DistributedWeights | NcclTransfer, address: str, ranks: int) -> JoinGroup:
    """``address`` is the group's, resolved and allowed."""
    return JoinGroup(
        backend=GroupBackend(group.backend.value),
        address=address,
        port=group.port,
        world_size=group.world_size,
        rank_offset=group.rank_offset,
        source_rank=group.source_rank,
        group=group.group,
        ranks=ranks,
        patience_s=_LONGEST_TRANSFER_S,
    )


def to_be_received(specs: Sequence[TensorSpec]) -> list[c.SharedTensor]:
    """They have no place yet. Raises SourceRefused."""
    for spec in specs:
        if 0 in spec.shape:
            raise SourceRefused(f"tensor {spec.name!r} is empty")
    return [shared_tensor(spec, 0) for spec in specs]


def _resolve(policy: sources.SourcePolicy, wanted: WeightSource) -> Source:
    """Blocks. Raises SourceRefused, CheckpointError or OSError."""
    match wanted:
        case DiskWeights(path=path, digests=digests):
            return policy.disk(path, {one.name: one.sha256 for one in digests})
        case SharedMemoryWeights():
            tensors = [shared_tensor(one.spec, one.offset_bytes) for one in wanted.tensors]
            found = policy.shared(wanted.object_name, tensors)
            _check_segment(found, wanted)
            return found
    raise SourceRefused(f"weights from {wanted.kind.value} are not offered")


def shared_tensor(spec: TensorSpec, offset: int) -> c.SharedTensor:
    return c.SharedTensor(spec.name, SAFETENSORS[spec.dtype], spec.shape, offset)


def _carried(one: InlineTensor) -> sources.InlineTensor:
    if one.data is None:
        raise SourceRefused(f"the content of tensor {one.spec.name!r} did not come with the order")
    spec = one.spec
    return sources.InlineTensor(spec.name, SAFETENSORS[spec.dtype], spec.shape, one.data)


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
