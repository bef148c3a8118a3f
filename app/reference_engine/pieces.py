"""Where the pieces of a weight session are: each found once for all ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import PurePosixPath
from typing import Any

from app.domain.weight_sessions import (
    Chunk,
    DiskChunk,
    DiskTransfer,
    IpcChunk,
    NcclChunk,
    NcclTransfer,
    SessionWeights,
)
from app.enginekit.runtime import Order
from app.reference_engine import change_orders as c
from app.reference_engine.demanded import Demanded
from app.reference_engine.engine import Engine
from app.reference_engine.errors import SourceRefused
from app.reference_engine.sources import SourcePolicy
from app.reference_engine.sourcing import (
    OwnSegment,
    Source,
    gives_up_at,
    joining,
    shared_tensor,
    to_be_received,
    told_as_faults,
    unless_lost,
)
from app.reference_engine.transfer import WeightTransfer, transfer_by

_OPENING = -1


class PieceSourcing:
    """Nothing happens before the first call of ``open``. What a trainer broadcasts lies in shared
    memory of the engine's own from its arrival until the next piece."""

    def __init__(
        self, session: SessionWeights, order: Order, engine: Engine, policy: SourcePolicy
    ) -> None:
        self._session = session
        self._order = order
        self._engine = engine
        self._policy = policy
        self._own = OwnSegment()
        self._joined = contextlib.AsyncExitStack()
        self._transfer: WeightTransfer | None = None
        self._works: dict[int, asyncio.Task[tuple[Source, ...]]] = {}

    async def open(self, rank: int) -> None:
        """Raises RuntimeFault."""
        await self._once(_OPENING, rank, self._open)

    async def of(self, chunk: Chunk, rank: int) -> tuple[Source, ...]:
        """For that rank, and the same for all. Raises RuntimeFault."""
        return await self._once(chunk.index, rank, lambda: self._find(chunk))

    @property
    def files(self) -> tuple[c.WeightFile, ...]:
        """All that were found so far, if all pieces are on disk."""
        found: list[c.WeightFile] = []
        for work in self._works.values():
            for source in work.result():
                if not isinstance(source, c.DiskSource):
                    return ()
                found += source.files
        return tuple(found)

    async def discard(self) -> None:
        """Leave the group, and remove what was put into shared memory; safe to repeat."""
        works = [work for work in self._works.values() if not work.done()]
        for work in works:
            work.cancel()
        if works:
            await asyncio.wait(works)
        for work in works:
            if not work.cancelled():
                work.exception()  # whoever waited for it was told
        joined, self._joined = self._joined, contextlib.AsyncExitStack()
        await joined.aclose()
        await self._own.discard()

    async def _once(
        self,
        index: int,
        rank: int,
        find: Callable[[], Coroutine[Any, Any, tuple[Source, ...]]],
    ) -> tuple[Source, ...]:
        """Shielded: a thread goes on when its caller is cancelled, and what it leaves in shared
        memory has to be known to ``discard``."""
        if index not in self._works:
            self._works[index] = asyncio.create_task(find(), name=f"find piece {index}")
        with told_as_faults(self._engine, rank):
            return await asyncio.shield(self._works[index])

    async def _open(self) -> tuple[Source, ...]:
        match self._session.transfer:
            case NcclTransfer() as group:
                await unless_lost(self._engine, self._join(group))
            case DiskTransfer(path=path):
                await asyncio.to_thread(self._policy.folder, path)
        return ()

    async def _join(self, group: NcclTransfer) -> None:
        address = await asyncio.to_thread(self._policy.rendezvous, group.address, group.port)
        join = joining(group, address, len(self._engine.ranks))
        transfer = await self._joined.enter_async_context(transfer_by(join))
        await transfer.join(gives_up_at(self._order))
        self._transfer = transfer

    async def _find(self, chunk: Chunk) -> tuple[Source, ...]:
        match chunk.payload, self._session.transfer:
            case DiskChunk(files=files), DiskTransfer(path=path):
                paths = [str(PurePosixPath(path) / file) for file in files]
                return tuple(await asyncio.to_thread(lambda: [*map(self._policy.disk, paths)]))
            case IpcChunk() as shared, _:
                return tuple(await asyncio.to_thread(_segments, self._policy, shared))
            case NcclChunk() as sent, _:
                return (await unless_lost(self._engine, self._receive(sent)),)
        raise SourceRefused("the piece does not travel as its session does")

    async def _receive(self, sent: NcclChunk) -> Source:
        """Every tensor is checked by what the order says of it before any is received."""
        if sent.packed:
            raise SourceRefused("packed tensors are not taken: send each by itself")
        tensors = to_be_received(sent.tensors)
        demanded = Demanded(self._engine.config)
        for one in tensors:
            demanded.takes(one.name, one.dtype, one.shape)
        transfer = self._transfer
        if transfer is None:
            raise SourceRefused("no group was joined")
        await self._own.discard()  # of the piece before, which every rank has
        sizes = [spec.size_bytes for spec in sent.tensors]
        own = await self._own.make(lambda: self._policy.room(tensors, sizes))
        await transfer.receive(own.path, own.tensors, gives_up_at(self._order))
        return own


def _segments(policy: SourcePolicy, chunk: IpcChunk) -> list[c.SharedSource]:
    """Blocks. Raises SourceRefused, OSError."""
    found: dict[str, list[c.SharedTensor]] = {}
    for index, spec in enumerate(chunk.tensors):
        handles = chunk.of_tensor(index)
        if len(handles) != 1 or handles[0].device_uuid:
            raise SourceRefused("tensors are taken from the host's memory alone, each once")
        (handle,) = handles
        try:
            name = handle.handle.decode("ascii")
        except UnicodeDecodeError as error:
            raise SourceRefused("a handle in the host's memory is a name in ASCII") from error
        found.setdefault(name, []).append(shared_tensor(spec, handle.offset_bytes))
    return [policy.shared(name.removeprefix("/"), found[name]) for name in found]
