"""Cache events pass through, to those who may see everybody's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.enginekit.cache_events import CacheEventFeed, StoredBlock
from app.rpc.openengine.v1 import error_pb2, kv_pb2
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, client_of, refused
from tests.enginekit.full_engine import FullEngine

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


@pytest.fixture
def double(full: EngineDouble) -> EngineDouble:
    return full


async def test_where_they_are_told(client: Client) -> None:
    for stub in (client.control, client.reading):
        told = await stub.GetKvEventSources(
            kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=[0]), timeout=30
        )
        assert [(source.transport, source.data_parallel_rank) for source in told.sources] == [
            ("grpc", 0)
        ]


async def test_they_are_relayed_until_the_subscriber_goes(
    client: Client, engine: FullEngine
) -> None:
    call = client.control.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(), timeout=30)
    seen: list[int] = []
    async for event in call:
        seen.append(event.batch.sequence_number)
        if len(seen) == 3:
            break
    assert seen == [1, 2, 3]
    call.cancel()
    async with asyncio.timeout(30):
        await engine.kv_closed.wait()


async def test_what_is_refused(client: Client, engine: FullEngine) -> None:
    request = kv_pb2.SubscribeKvEventsRequest()
    seen = await refused(client.reading.SubscribeKvEvents(request, timeout=30))
    assert (seen.code, seen.reason) == (Code.PERMISSION_DENIED, "ADMIN_LISTENER_ONLY")
    request.start_sequence_number = 101
    seen = await refused(client.control.SubscribeKvEvents(request, timeout=30))
    assert (seen.code, seen.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert engine.kv_told == 0


async def test_a_subscription_does_not_hold_up_the_end(
    client: Client, double: EngineDouble, engine: FullEngine
) -> None:
    told = []

    async def read() -> None:
        request = kv_pb2.SubscribeKvEventsRequest()
        async for event in client.control.SubscribeKvEvents(request, timeout=30):
            told.append(event)
            first.set()

    first = asyncio.Event()
    reading = asyncio.create_task(read())
    await first.wait()
    async with asyncio.timeout(60):
        # Longer than anyone waits: it ends because the subscription does.
        await double.server.stop(3600)
        await reading
    assert told[-1].error.code == error_pb2.ERROR_CODE_DRAINING
    assert engine.kv_closed.is_set()


class FedEngine(FullEngine):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.feed = CacheEventFeed(block_size=1, now_ns=lambda: 1, kept_batches=8)

    def kv_events(
        self, request: kv_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
        return self.feed.subscribe(request)


async def test_who_does_not_read_is_told_of_the_gap(tmp_path: Path) -> None:
    """Without a gap up to there, and with nothing behind it."""
    wide = "x" * 200_000
    async with running_engine(tmp_path, make_engine=FedEngine) as double, client_of(double) as own:
        assert isinstance(double.engine, FedEngine)
        request = kv_pb2.SubscribeKvEventsRequest(include_snapshot=True)
        call: Any = own.control.SubscribeKvEvents(request, timeout=120)
        last = (await call.read()).batch.sequence_number
        for number in range(200):
            key = number.to_bytes(2)
            block = StoredBlock(key=key, parent=b"", token_ids=(1,), extra=(wide,))
            double.engine.feed.tell([block])
            await asyncio.sleep(0)
        while not (told := await call.read()).HasField("error"):
            last += 1
            assert told.batch.sequence_number == last
        assert told.error.code == error_pb2.ERROR_CODE_OVERLOADED
        assert last < 1 + 200
        assert await call.read() is grpc.aio.EOF
