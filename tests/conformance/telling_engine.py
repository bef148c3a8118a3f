"""A right engine that tells what becomes of its prefix cache, which holds a few words a block."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from app.domain.commands import FlushCaches
from app.enginekit.cache_events import (
    CacheEvent,
    CacheEventFeed,
    ClearedBlocks,
    RemovedBlocks,
    StoredBlock,
)
from app.enginekit.runtime import Order
from app.rpc.openengine.v1 import generation_pb2, kv_pb2
from tests.conformance.adapter_engine import AdapterEngine

_SIZE = 4
_MOST = 5


class TellingEngine(AdapterEngine):
    """Of each prompt it stores the first words; the oldest blocks make room."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        numbers = itertools.count(1000)
        self.feed = CacheEventFeed(block_size=_SIZE, now_ns=lambda: next(numbers))
        self.stored: dict[bytes, StoredBlock] = {}

    async def kv_event_sources(
        self, request: kv_pb2.GetKvEventSourcesRequest
    ) -> kv_pb2.GetKvEventSourcesResponse:
        return self.feed.sources(request)

    def kv_events(
        self, request: kv_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
        return self.feed.subscribe(request)

    async def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self._store(f"{request.request_id} {request.prompt}".split())
        async with aclosing(super().generate(request)) as said:  # type: ignore[type-var]
            async for response in said:
                yield response

    async def commit(self, order: Order, rank: int) -> None:
        await super().commit(order, rank)
        if isinstance(order.command, FlushCaches) and rank == 0:
            self.stored.clear()
            self.tell(ClearedBlocks())

    def tell(self, *events: CacheEvent) -> None:
        self.feed.tell(events)

    def _store(self, words: list[str]) -> None:
        parent = b""
        for start in range(0, len(words) - _SIZE + 1, _SIZE):
            own = words[start : start + _SIZE]
            key = hashlib.sha256(parent + " ".join(own).encode()).digest()
            if key not in self.stored:
                if len(self.stored) >= _MOST:
                    oldest = next(iter(self.stored))
                    del self.stored[oldest]
                    self.tell(RemovedBlocks((oldest,)))
                tokens = tuple(len(word) for word in own)
                self.stored[key] = StoredBlock(key=key, parent=parent, token_ids=tokens)
                self.tell(self.stored[key])
            parent = key
