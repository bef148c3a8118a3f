"""Cache events of one data-parallel rank, for runtimes that offer them: numbers, replay, snapshots.

A runtime tells its `CacheEventFeed` what becomes of the blocks that later prompts can find, and has
`kv_event_sources` and `kv_events` answered by it.

A subscriber who applies the events in order always has the set of findable blocks. Batches are
numbered without a gap. The numbers begin at the time of start in nanoseconds, so that those of an
earlier life are known as such, and never mistaken for this one's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from app.enginekit.runtime import RequestRefused
from app.rpc.openengine.v1 import error_pb2, kv_pb2

# Batches that can be had again; a subscriber who is further behind than that is ended.
_KEPT_BATCHES = 1024
# Of one batch of a snapshot: well below the 4 MiB that gRPC clients take by default.
_SNAPSHOT_BLOCKS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """`key` and `parent` are hashes, the parent's empty for the first block of a chain. The keys of
    `extra` tell blocks apart that hold the same tokens."""

    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    request_id: str = ""
    lora_id: int = 0
    lora_name: str = ""
    extra: tuple[str, ...] = ()

    def continues(self, other: StoredBlock) -> bool:
        """Whether one event can tell of both."""
        same = (self.request_id, self.lora_name, self.extra)
        return self.parent == other.key and same == (
            other.request_id,
            other.lora_name,
            other.extra,
        )


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ClearedBlocks:
    pass


CacheEvent = StoredBlock | RemovedBlocks | ClearedBlocks


@dataclass(slots=True, kw_only=True)
class CacheEventFeed:
    """Lives on one event loop. `block_size` in tokens; `now_ns` gives the time since 1970. `medium`
    GPU: the memory that the engine computes in, whatever it is made of."""

    block_size: int
    now_ns: Callable[[], int]
    data_parallel_rank: int = 0
    medium: kv_pb2.StorageMedium.ValueType = kv_pb2.STORAGE_MEDIUM_GPU
    kept_batches: int = _KEPT_BATCHES
    _last: int = field(init=False)
    _kept: deque[kv_pb2.KvEventBatch] = field(init=False, default_factory=deque)
    _blocks: dict[bytes, StoredBlock] = field(init=False, default_factory=dict)
    _told: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._last = self.now_ns()

    @property
    def blocks(self) -> int:
        """That can be found now."""
        return len(self._blocks)

    def tell(self, events: Sequence[CacheEvent]) -> None:
        """One batch; nothing for none."""
        if not events:
            return
        for event in events:
            match event:
                case StoredBlock(key=key):
                    self._blocks[key] = event
                case RemovedBlocks(keys=keys):
                    for key in keys:
                        self._blocks.pop(key, None)
                case ClearedBlocks():
                    self._blocks.clear()
        self._last += 1
        self._kept.append(self._batch(self._last, events))
        while len(self._kept) > self.kept_batches:
            self._kept.popleft()
        told, self._told = self._told, asyncio.Event()
        told.set()

    def sources(self, request: kv_pb2.GetKvEventSourcesRequest) -> kv_pb2.GetKvEventSourcesResponse:
        """`grpc` without an address: SubscribeKvEvents of the admin listener itself. Raises
        RequestRefused."""
        self._check_ranks(request.data_parallel_ranks)
        source = kv_pb2.KvEventSource(
            transport="grpc",
            data_parallel_rank=self.data_parallel_rank,
            encoding="protobuf",
            schema_version=1,
            buffer_steps=self.kept_batches,
            max_queue_size=self.kept_batches,
        )
        return kv_pb2.GetKvEventSourcesResponse(sources=[source])

    async def subscribe(
        self, request: kv_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
        """For ever, or until the subscriber is too slow, which is an `error` response.

        `start_sequence_number` N: from batch N on. `include_snapshot`: first the whole cache, as a
        clearing and what is stored; with both, only where N cannot be had any more. Neither: what
        comes from now on. All batches of a snapshot but the last are numbered 0; the last has the
        number of the latest batch that the snapshot includes. Raises RequestRefused.
        """
        self._check_ranks(request.data_parallel_ranks)
        wanted = request.start_sequence_number
        at = self._last + 1
        if wanted and self._oldest <= wanted <= at:
            at = wanted
        elif request.include_snapshot:
            # All of it now, since the cache moves on while it is being sent.
            for batch in tuple(self._snapshot()):
                yield kv_pb2.SubscribeKvEventsResponse(batch=batch)
        elif wanted:
            raise _invalid(
                f"batch {wanted} cannot be had, the oldest is {self._oldest}: ask for a snapshot"
            )
        while True:
            if at < self._oldest:
                yield _fallen_behind(self._oldest - at)
                return
            if at > self._last:
                await self._told.wait()
                continue
            yield kv_pb2.SubscribeKvEventsResponse(batch=self._kept[at - self._oldest])
            at += 1

    @property
    def _oldest(self) -> int:
        """Number of the oldest batch that can be had, or will be."""
        return self._last + 1 - len(self._kept)

    def _check_ranks(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank != self.data_parallel_rank:
                raise _invalid(f"data_parallel_ranks: there is no rank {rank}")

    def _snapshot(self) -> Iterator[kv_pb2.KvEventBatch]:
        blocks = _parents_first(self._blocks)
        parts = [
            blocks[start : start + _SNAPSHOT_BLOCKS]
            for start in range(0, len(blocks) or 1, _SNAPSHOT_BLOCKS)
        ]
        for index, part in enumerate(parts):
            events: list[CacheEvent] = [*part]
            if index == 0:
                events.insert(0, ClearedBlocks())
            yield self._batch(self._last if part is parts[-1] else 0, events)

    def _batch(self, number: int, events: Sequence[CacheEvent]) -> kv_pb2.KvEventBatch:
        return kv_pb2.KvEventBatch(
            sequence_number=number,
            timestamp_unix_nanos=self.now_ns(),
            data_parallel_rank=self.data_parallel_rank,
            events=[self._event(run) for run in _runs(events)],
        )

    def _event(self, run: Sequence[CacheEvent]) -> kv_pb2.KvEvent:
        match run[0]:
            case StoredBlock() as first:
                stored = [block for block in run if isinstance(block, StoredBlock)]
                return kv_pb2.KvEvent(
                    request_id=first.request_id, block_stored=self._stored(stored)
                )
            case RemovedBlocks(keys=keys):
                removed = kv_pb2.BlockRemoved(block_hashes=map(_hash, keys), medium=self.medium)
                return kv_pb2.KvEvent(block_removed=removed)
            case ClearedBlocks():
                return kv_pb2.KvEvent(all_blocks_cleared=kv_pb2.AllBlocksCleared())

    def _stored(self, chain: Sequence[StoredBlock]) -> kv_pb2.BlockStored:
        first = chain[0]
        stored = kv_pb2.BlockStored(
            block_hashes=[_hash(block.key) for block in chain],
            token_ids=[token for block in chain for token in block.token_ids],
            block_size=self.block_size,
            lora_id=first.lora_id,
            lora_name=first.lora_name,
            medium=self.medium,
        )
        if first.parent:
            stored.parent_block_hash.CopyFrom(_hash(first.parent))
        if first.extra:
            stored.extra_keys.extend(kv_pb2.OpaqueKeyTuple(values=first.extra) for _ in chain)
        return stored


def _runs(events: Sequence[CacheEvent]) -> Iterator[Sequence[CacheEvent]]:
    """Blocks of one chain that follow each other are told of in one event."""
    run: list[CacheEvent] = []
    for event in events:
        before = run[-1] if run else None
        chained = (
            isinstance(event, StoredBlock)
            and isinstance(before, StoredBlock)
            and event.continues(before)
        )
        if run and not chained:
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def _parents_first(blocks: dict[bytes, StoredBlock]) -> list[StoredBlock]:
    """A block may have been stored again after those that follow it.

    Where keys are hashes of all that comes before, no block follows itself; a runtime whose keys
    are something else gets a snapshot too, in an order that breaks its circle somewhere.
    """
    ordered: dict[bytes, StoredBlock] = {}
    for block in blocks.values():
        missing: dict[bytes, StoredBlock] = {}
        at: StoredBlock | None = block
        while at is not None and at.key not in ordered and at.key not in missing:
            missing[at.key] = at
            at = blocks.get(at.parent)
        for one in reversed(missing.values()):
            ordered[one.key] = one
    return list(ordered.values())


def _hash(key: bytes) -> kv_pb2.KvBlockHash:
    return kv_pb2.KvBlockHash(value=key, encoding="bytes")


def _fallen_behind(batches: int) -> kv_pb2.SubscribeKvEventsResponse:
    message = f"{batches} batches were missed by reading too slowly: subscribe with a snapshot"
    error = error_pb2.EngineError(
        code=error_pb2.ERROR_CODE_OVERLOADED, message=message, retryable=True
    )
    return kv_pb2.SubscribeKvEventsResponse(error=error)


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(error_pb2.ERROR_CODE_INVALID_ARGUMENT, message)
