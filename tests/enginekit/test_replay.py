"""Idempotency keys, observers that go away, and operations that go on without them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble, Fault, running_engine
from tests.enginekit.client import (
    Client,
    assert_whole,
    client_of,
    refused,
    shape,
    until,
)
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


async def test_fifty_parallel_calls_with_one_key_are_one_order(
    client: Client, double: EngineDouble
) -> None:
    order = client.pause(idempotency_key="same")
    streams = await asyncio.gather(*(client.order(order) for _ in range(50)))
    first = streams[0]
    assert_whole(first)
    assert all(stream == first for stream in streams)
    assert double.rpcs["Pause"] == 50
    assert double.orders == [first[0].operation_id]


async def test_parallel_calls_with_fifty_keys_are_taken_one_at_a_time(
    client: Client, double: EngineDouble
) -> None:
    """Whoever is not first is told who is, or finds the engine paused already."""

    async def one() -> str:
        try:
            events = await client.order(client.pause())
        except grpc.aio.AioRpcError as error:
            return error.code().name
        assert_whole(events)
        return "changed" if events[-1].completed.changed else "unchanged"

    ends = await asyncio.gather(*(one() for _ in range(50)))
    assert ends.count("changed") == 1
    assert set(ends) <= {"changed", "unchanged", "ABORTED"}
    assert len(double.orders) == 1


async def test_a_key_used_for_another_call_is_refused(client: Client) -> None:
    events = await client.order(client.pause(idempotency_key="k"))
    for other in (
        client.pause("abort", idempotency_key="k"),
        client.pause(idempotency_key="k", deadline_ms=5000),
        client.resume(2, idempotency_key="k"),
        client.flush(idempotency_key="k"),
    ):
        seen = await refused(client.stream(other))
        assert (seen.code, seen.reason) == (Code.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED")
        assert seen.metadata["operation_id"] == events[0].operation_id


async def test_a_replay_starts_with_the_first_event_and_goes_on(
    client: Client, double: EngineDouble
) -> None:
    let_go = asyncio.Event()
    double.engine.script("commit", until_set(let_go))
    order = client.pause("abort", idempotency_key="k")
    first = await client.begin(order)
    again = await client.begin(order)
    assert again.events == first.events
    let_go.set()
    assert await first.rest() == await again.rest() == await client.order(order)
    assert_whole(first.events)
    assert len(double.orders) == 1


async def test_an_observer_that_goes_away_stops_nothing(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    request = client.generate()
    await request.first()
    draining = await client.begin(client.pause(idempotency_key="k"))
    draining.detach()
    double.engine.go()
    assert await request.finish_reason() == "LENGTH"

    async def over() -> bool:
        return (await client.operation(idempotency_key="k")).HasField("completed")

    await until(over)
    assert await client.admission() == "paused"
    assert_whole(await client.order(client.pause(idempotency_key="k")))


@pytest.mark.parametrize(
    "fault", [Fault.DROP_AFTER_ACCEPTANCE, Fault.LOSE_REPLY], ids=lambda fault: fault.value
)
async def test_a_lost_connection_is_made_good_by_the_same_call(
    fault: Fault, client: Client, double: EngineDouble
) -> None:
    double.fail_next("Pause", fault)
    order = client.pause(idempotency_key="k")
    assert (await refused(client.stream(order))).code is Code.UNAVAILABLE
    events = await client.order(order)
    assert_whole(events)
    assert events[-1].completed.changed
    assert len(double.orders) == 1


async def test_a_call_that_never_arrived_left_nothing(client: Client, double: EngineDouble) -> None:
    double.fail_next("Pause", Fault.REFUSE_CONNECTION)
    assert (await refused(client.stream(client.pause(idempotency_key="k")))).code is (
        Code.UNAVAILABLE
    )
    seen = await refused(
        client.admin.GetOperation(pb.GetAdminOperationRequest(idempotency_key="k"), timeout=10)
    )
    assert seen.code is Code.NOT_FOUND


async def test_callers_that_give_up_while_an_order_is_judged(
    client: Client, double: EngineDouble
) -> None:
    """Whether the acceptance was seen cannot be known, so there is one order or none, and the
    same call finds out which."""
    order = client.flush(idempotency_key="k")
    for _ in range(20):
        call = client.stream(order)
        await asyncio.sleep(0)
        call.cancel()
    assert_whole(await client.order(order))
    assert len(double.orders) == 1


async def test_a_full_store_refuses_until_something_may_be_forgotten(tmp_path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def clock() -> datetime:
        return now

    async with (
        running_engine(tmp_path, now=clock, operations_kept=3) as double,
        client_of(double) as client,
    ):
        profile = await client.profile()
        assert profile.limits.operations_kept == 3
        assert profile.limits.key_retention_ms == 24 * 3600 * 1000
        for number in range(3):
            await client.order(client.flush(idempotency_key=f"k{number}"))
        seen = await refused(client.stream(client.flush()))
        assert (seen.code, seen.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_OPERATIONS")
        # A replay needs no room.
        assert shape(await client.order(client.flush(idempotency_key="k0")))[-1] == "completed"
        now += timedelta(hours=24)
        assert (await refused(client.stream(client.flush()))).code is Code.RESOURCE_EXHAUSTED
        now += timedelta(seconds=1)
        assert await client.order(client.flush())
        seen = await refused(
            client.admin.GetOperation(pb.GetAdminOperationRequest(idempotency_key="k0"), timeout=10)
        )
        assert seen.code is Code.NOT_FOUND


async def test_an_open_operation_is_never_forgotten(tmp_path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    async with (
        running_engine(tmp_path, now=lambda: now, operations_kept=1) as double,
        client_of(double) as client,
    ):
        let_go = asyncio.Event()
        double.engine.script("prepare", until_set(let_go))
        running = await client.begin(client.flush(idempotency_key="k"))
        now += timedelta(days=3)
        assert (await refused(client.stream(client.flush()))).code is Code.ABORTED
        let_go.set()
        assert_whole(await running.rest())
