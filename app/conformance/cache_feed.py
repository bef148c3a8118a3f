"""A subscription to cache events: applied as they come, and ended when it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from app.conformance.cache_view import CacheView
from app.conformance.case import NotHeld, expect
from app.conformance.client import Client, brief
from app.conformance.record import Record, Refusal
from app.rpc.openengine.v1 import kv_pb2

Batch = kv_pb2.KvEventBatch
_METHOD = "SubscribeKvEvents"


class CacheFeed:
    """`batches` are all that came, in order."""

    def __init__(self, call: Any, record: Record, patience_s: float) -> None:
        self._call = call
        self._record = record
        self._patience_s = patience_s
        self.view = CacheView()
        self.batches: list[Batch] = []

    async def next(self) -> Batch | Refusal | None:
        """None: nothing came for a while, or the stream is over."""
        try:
            async with asyncio.timeout(self._patience_s):
                told: Any = await self._call.read()
        except TimeoutError:
            return None
        except grpc.aio.AioRpcError as error:
            return self._record.refused(_METHOD, error)
        if not isinstance(told, kv_pb2.SubscribeKvEventsResponse):
            return None
        self._record.heard(f"event of {_METHOD}", told)
        expect(told.HasField("batch"), "a batch", brief(told))
        self.view.take(told.batch)
        self.batches.append(told.batch)
        return told.batch

    async def batch(self) -> Batch:
        """Raises NotHeld where there is none."""
        found = await self.next()
        if isinstance(found, Batch):
            return found
        raise NotHeld("a batch of cache events", str(found or "nothing"))

    async def snapshot(self) -> int:
        """To its end; the number from which events go on."""
        while not (await self.batch()).sequence_number:
            pass
        return self.view.last

    async def reach(self, number: int) -> None:
        while self.view.last < number:
            await self.batch()


@asynccontextmanager
async def subscribed(
    client: Client, record: Record, patience_s: float, **fields: Any
) -> AsyncGenerator[CacheFeed]:
    call = client.stream_of_control(_METHOD, kv_pb2.SubscribeKvEventsRequest(**fields))
    try:
        yield CacheFeed(call, record, patience_s)
    finally:
        call.cancel()
