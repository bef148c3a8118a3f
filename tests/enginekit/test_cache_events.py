"""Cache events pass through, to those who may see everybody's tokens."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from app.rpc.openengine.v1 import error_pb2, kv_pb2
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import Client, refused
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
