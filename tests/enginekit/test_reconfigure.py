"""Another shape of serving: one order at a time, and the old shape where it fails."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from app.domain.kinds import OperationKind
from app.enginekit.runtime import Order
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import server_pb2
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import Client, Observing, assert_whole, refused, until
from tests.enginekit.full_engine import FullEngine
from tests.enginekit.minimal_engine import Hook, fault
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
PREFILL = server_pb2.ENGINE_ROLE_PREFILL


@pytest.fixture
def double(full: EngineDouble) -> EngineDouble:
    return full


def reconfigure_only(hook: Hook) -> Hook:
    async def scripted(order: Order, rank: int) -> None:
        if order.command.kind is OperationKind.RECONFIGURE_SERVING:
            await hook(order, rank)

    return scripted


async def test_a_target_is_reached_and_admission_opens_again(
    client: Client, engine: FullEngine
) -> None:
    engine.stall()
    running = client.generate()
    await running.first()
    reshaping = await client.begin(client.reconfigure(role="prefill", max_running_requests=8))
    await reshaping.next()
    assert await client.admission() == "draining"
    engine.go()
    events = await reshaping.rest()
    assert_whole(events)
    completed = events[-1].completed
    assert completed.verification == pb.VERIFICATION_VERIFIED
    result = completed.reconfigure_serving
    assert (result.role, result.max_running_requests) == (PREFILL, 8)
    assert (result.tensor_parallel_size, result.max_batched_tokens) == (2, 512)
    assert await running.finish_reason() == "LENGTH"
    profile = await client.profile()
    assert profile.state.role == PREFILL
    assert profile.state.admission == pb.ADMISSION_STATE_OPEN
    assert profile.revision == completed.revision
    info = await client.control.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=10)
    assert info.capacity.max_running_requests == 8


async def test_it_may_change_the_number_of_ranks(client: Client, engine: FullEngine) -> None:
    result = await client.completed(client.reconfigure(tensor_parallel_size=3))
    assert result.reconfigure_serving.tensor_parallel_size == 3
    assert (await client.profile()).world_size == 3
    assert {call.rank for call in engine.calls if call.kind is OperationKind.RESUME} == {
        -1,
        0,
        1,
        2,
    }
    assert await client.generate().finish_reason() == "LENGTH"


async def test_what_is_so_already_changes_nothing(client: Client, engine: FullEngine) -> None:
    engine.stall()
    running = client.generate()
    await running.first()
    before = await client.profile()
    same = await client.completed(client.reconfigure(role="aggregated", max_batched_tokens=512))
    assert not same.changed
    assert same.revision == before.revision
    assert engine.calls == []
    running.hang_up()


async def test_the_same_target_is_the_same_operation_and_another_is_refused(
    client: Client, engine: FullEngine
) -> None:
    let_go = asyncio.Event()
    engine.script("prepare", reconfigure_only(until_set(let_go)))
    first = await client.begin(client.reconfigure(role="prefill"))
    await until(lambda: len(engine.calls) > 3)
    second = Observing(client.stream(client.reconfigure(role="prefill", drain="abort")))
    assert await second.accepted() == first.events[0].operation_id
    seen = await refused(client.stream(client.reconfigure(role="decode")))
    assert (seen.code, seen.reason) == (Code.ABORTED, "ENGINE_BUSY")
    assert seen.metadata["operation_id"] == first.events[0].operation_id
    let_go.set()
    assert (await first.end()).HasField("completed")
    assert (await second.rest()) == first.events


@pytest.mark.parametrize("phase", ["prepare", "commit", "conclude"])
async def test_a_failure_leaves_the_old_shape(
    phase: str, client: Client, engine: FullEngine
) -> None:
    engine.script(phase, reconfigure_only(fault), -1 if phase == "conclude" else 1)
    events = await client.order(client.reconfigure(role="prefill"))
    assert_whole(events)
    assert events[-1].failed.reason == "RANK_BROKEN"
    profile = await client.profile()
    assert profile.state.role == server_pb2.ENGINE_ROLE_AGGREGATED
    assert profile.state.admission == pb.ADMISSION_STATE_OPEN
    assert await client.generate().finish_reason() == "LENGTH"


async def test_an_engine_that_stays_as_it_was_is_not_verified(
    client: Client, engine: FullEngine
) -> None:
    engine.stubborn = True
    completed = await client.completed(client.reconfigure(max_running_requests=8))
    assert completed.verification == pb.VERIFICATION_UNVERIFIED
    assert completed.reconfigure_serving.max_running_requests == 32


async def test_a_pause_that_was_there_is_left_there(client: Client, engine: FullEngine) -> None:
    paused = await client.completed(client.pause())
    await client.completed(client.reconfigure(role="prefill"))
    profile = await client.profile()
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    assert profile.pause_epoch == paused.pause.pause_epoch


async def test_ranks_that_do_not_resume_stay_paused_in_the_new_shape(
    client: Client, engine: FullEngine
) -> None:
    async def no_resume(order: Order, rank: int) -> None:
        if order.command.kind is OperationKind.RESUME:
            await fault(order, rank)

    engine.script("prepare", no_resume)
    events = await client.order(client.reconfigure(role="prefill"))
    assert [e.warning.reason for e in events if e.HasField("warning")] == ["PAUSE_NOT_LIFTED"]
    assert events[-1].HasField("completed")
    engine.scripts.clear()
    profile = await client.profile()
    assert profile.state.role == PREFILL
    assert (await client.completed(client.resume(profile.pause_epoch))).changed


async def test_refuse_touches_no_request(client: Client, engine: FullEngine) -> None:
    engine.stall()
    running = client.generate()
    await running.first()
    seen = await refused(client.stream(client.reconfigure(role="prefill", drain="refuse")))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "REQUESTS_IN_FLIGHT")
    engine.go()
    assert await running.finish_reason() == "LENGTH"


def reconfigure(**fields: Any) -> pb.ReconfigureServingRequest:
    """Untyped, so that numbers which are in no enum can be sent."""
    return pb.ReconfigureServingRequest(idempotency_key="k", **fields)


@pytest.mark.parametrize(
    ("request_", "code", "fields"),
    [
        (reconfigure(drain=1), Code.INVALID_ARGUMENT, ("",)),
        (reconfigure(role=1), Code.INVALID_ARGUMENT, ("drain",)),
        (reconfigure(role=0, drain=1), Code.INVALID_ARGUMENT, ("role",)),
        (reconfigure(role=99, drain=1), Code.INVALID_ARGUMENT, ("role",)),
        (
            reconfigure(tensor_parallel_size=0, drain=1),
            Code.INVALID_ARGUMENT,
            ("tensor_parallel_size",),
        ),
        (reconfigure(data_parallel_size=2, drain=1), Code.UNIMPLEMENTED, ()),
    ],
)
async def test_malformed_orders_are_refused(
    request_: Any, code: Code, fields: tuple[str, ...], client: Client, engine: FullEngine
) -> None:
    seen = await refused(client.stream(request_))
    assert (seen.code, seen.fields) == (code, fields)
    assert engine.calls == []
