"""Profiles: one at a time, beside everything else, with an end whatever happens."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from app.domain.kinds import OperationKind
from app.enginekit.runtime import RuntimeFault
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import Client, assert_whole, refused, until
from tests.enginekit.full_engine import FullEngine, checksum
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
TORCH = pb.PROFILER_KIND_TORCH


@pytest.fixture
def double(full: EngineDouble) -> EngineDouble:
    return full


async def ended(client: Client, operation_id: str) -> pb.AdminOperation:
    async def over() -> bool:
        return bool((await client.operation(operation_id=operation_id)).WhichOneof("outcome"))

    await until(over)
    return await client.operation(operation_id=operation_id)


async def broken() -> None:
    raise RuntimeFault("NO_SPACE", "the disk is full")


async def bug() -> None:
    raise ZeroDivisionError("secret detail of the engine")


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_profile_records_until_it_is_stopped(client: Client, engine: FullEngine) -> None:
    before = await client.profile()
    started = await client.start_profile(record_shapes=True)
    assert (started.state, started.already_running) == (pb.PROFILE_STATE_RUNNING, False)
    profile_id = started.profile_id
    state = (await client.profile()).state
    assert (state.profile.profile_id, state.profile.kind, state.profile.state) == (
        profile_id,
        TORCH,
        pb.PROFILE_STATE_RUNNING,
    )
    # Beside it orders are carried out.
    assert (await client.completed(client.pause())).changed
    let_go = asyncio.Event()
    engine.profiling["finish"] = let_go.wait  # type: ignore[assignment]
    stopped = await client.stop_profile(profile_id)
    assert (stopped.operation_id, stopped.state) == (
        started.operation_id,
        pb.PROFILE_STATE_EXPORTING,
    )
    assert (await client.stop_profile(profile_id)).state == pb.PROFILE_STATE_EXPORTING
    assert (await client.profile()).state.profile.state == pb.PROFILE_STATE_EXPORTING
    let_go.set()
    operation = await ended(client, started.operation_id)
    assert operation.profile_id == profile_id
    result = operation.completed.profile
    assert (result.profile_id, result.kind) == (profile_id, TORCH)
    assert [(a.rank, a.path, a.size_bytes, a.sha256, a.media_type) for a in result.artifacts] == [
        (rank, f"{profile_id}/rank{rank}.json", 9, checksum(rank, "trace"), "application/json")
        for rank in (0, 1)
    ]
    after = await client.profile()
    assert not after.state.HasField("profile")
    assert after.revision == before.revision + 1  # the pause's
    assert engine.recorded == ["started torch", "finished"]
    assert (await client.stop_profile(profile_id)).state == pb.PROFILE_STATE_READY


async def test_the_same_again_is_the_running_one_and_another_is_refused(
    client: Client, engine: FullEngine
) -> None:
    first = await client.start_profile(steps=5, idempotency_key="first")
    again = await client.start_profile(steps=5)
    assert again.already_running
    assert (again.operation_id, again.profile_id) == (first.operation_id, first.profile_id)
    replay = await client.start_profile(steps=5, idempotency_key="first")
    assert (replay.operation_id, replay.already_running) == (first.operation_id, False)
    for other in (client.start_profile(steps=6), client.start_profile("memory", steps=5)):
        seen = await refused(other)
        assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "PROFILE_RUNNING")
    reused = await refused(client.start_profile(steps=6, idempotency_key="first"))
    assert reused.code is Code.ALREADY_EXISTS
    reused = await refused(client.stop_profile(first.profile_id, idempotency_key="first"))
    assert reused.code is Code.ALREADY_EXISTS
    assert engine.recorded == ["started torch"]
    engine.steps_done.set()
    assert (await ended(client, first.operation_id)).HasField("completed")
    replay = await client.start_profile(steps=5, idempotency_key="first")
    assert (replay.operation_id, replay.state) == (first.operation_id, pb.PROFILE_STATE_READY)
    engine.steps_done.clear()
    new = await client.start_profile(steps=5)
    assert new.operation_id != first.operation_id


async def test_two_starts_at_once_are_one(client: Client, engine: FullEngine) -> None:
    let_go = asyncio.Event()
    engine.profiling["start"] = let_go.wait  # type: ignore[assignment]
    calls = [asyncio.ensure_future(client.start_profile(steps=5)) for _ in range(3)]
    await asyncio.sleep(0.05)
    let_go.set()
    answers = await asyncio.gather(*calls)
    assert len({answer.operation_id for answer in answers}) == 1
    assert sorted(answer.already_running for answer in answers) == [False, True, True]


async def test_time_bounds_it(client: Client, engine: FullEngine) -> None:
    started = await client.start_profile(duration_ms=50)
    assert (await ended(client, started.operation_id)).HasField("completed")


@pytest.mark.parametrize(
    ("step", "fault", "reason"),
    [
        ("start", broken, "NO_SPACE"),
        ("start", bug, "INTERNAL"),
    ],
)
async def test_what_does_not_start_is_told_to_the_caller(
    step: str, fault: Any, reason: str, client: Client, engine: FullEngine
) -> None:
    engine.profiling[step] = fault
    seen = await refused(client.start_profile())
    assert (seen.code, seen.reason) == (Code.INTERNAL, reason)
    assert "secret" not in seen.message
    operation = await client.operation(operation_id=seen.metadata["operation_id"])
    assert operation.failed.reason == reason
    assert engine.recorded == []
    engine.profiling.clear()
    assert (await client.start_profile()).state == pb.PROFILE_STATE_RUNNING


@pytest.mark.parametrize(
    ("step", "fault", "reason"),
    [
        ("profiled", broken, "NO_SPACE"),
        ("profiled", bug, "INTERNAL"),
        ("finish", broken, "NO_SPACE"),
        ("finish", bug, "INTERNAL"),
    ],
)
async def test_what_fails_later_stops_recording(
    step: str, fault: Any, reason: str, client: Client, engine: FullEngine
) -> None:
    engine.profiling[step] = fault
    started = await client.start_profile(idempotency_key="k", duration_ms=50)
    operation = await ended(client, started.operation_id)
    assert operation.failed.reason == reason
    end = "finished" if step == "finish" else "dropped"
    assert engine.recorded == ["started torch", end]
    assert not (await client.profile()).state.HasField("profile")
    replay = await client.start_profile(idempotency_key="k", duration_ms=50)
    assert replay.state == pb.PROFILE_STATE_FAILED


@pytest.mark.parametrize("step", ["start", "profiled", "finish"])
async def test_a_deadline_ends_it_wherever_it_hangs(
    step: str, client: Client, engine: FullEngine
) -> None:
    engine.profiling[step] = never
    duration: dict[str, Any] = {"duration_ms": 20} if step == "finish" else {}
    call = client.start_profile(deadline_ms=1000, **duration)
    if step == "start":
        seen = await refused(call)
        assert (seen.code, seen.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert engine.recorded == []
        return
    operation = await ended(client, (await call).operation_id)
    assert operation.failed.reason == "DEADLINE_EXCEEDED"
    end = "finished" if step == "finish" else "dropped"
    assert engine.recorded == ["started torch", end]


async def test_it_can_be_cancelled_while_it_records_or_starts(
    client: Client, engine: FullEngine
) -> None:
    started = await client.start_profile()
    await client.cancel(started.operation_id)
    assert (await ended(client, started.operation_id)).HasField("cancelled")
    assert engine.recorded == ["started torch", "dropped"]
    engine.profiling["start"] = never
    call = asyncio.ensure_future(client.start_profile())

    async def opened() -> bool:
        return bool((await client.profile()).state.open_operations)

    await until(opened)
    (row,) = (await client.profile()).state.open_operations
    await client.cancel(row.operation_id)
    seen = await refused(call)
    assert (seen.code, seen.reason) == (Code.ABORTED, "CANCELLED")


async def test_a_runtime_that_cannot_even_stop_delays_nothing(
    client: Client, engine: FullEngine
) -> None:
    engine.profiling["drop"] = bug
    started = await client.start_profile()
    await client.cancel(started.operation_id)
    assert (await ended(client, started.operation_id)).HasField("cancelled")


async def test_it_has_events_like_any_operation(client: Client, engine: FullEngine) -> None:
    started = await client.start_profile(steps=5)
    engine.steps_done.set()
    await ended(client, started.operation_id)
    store = engine.calls  # nothing reached the ranks as an order
    assert store == []
    operation = await client.operation(operation_id=started.operation_id)
    assert operation.kind == pb.ADMIN_OPERATION_KIND_PROFILE
    assert operation.last_sequence == 4  # accepted, recording, exporting, completed


async def test_not_while_the_engine_is_taken_apart(client: Client, engine: FullEngine) -> None:
    started = await client.start_profile(steps=5)
    let_go = asyncio.Event()
    engine.script("prepare", until_set(let_go))
    for order in (client.release("kv_cache"), client.reconfigure(max_running_requests=8)):
        observing = await client.begin(order)
        for call in (client.start_profile(steps=5), client.stop_profile(started.profile_id)):
            seen = await refused(call)
            assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "PROFILING_REFUSED")
            assert seen.metadata["operation_id"] == observing.events[0].operation_id
        let_go.set()
        assert_whole(await observing.rest())
        if order.DESCRIPTOR.name == "ReleaseResourcesRequest":
            epoch = (await client.profile()).release_epoch
            await client.completed(client.restore("kv_cache", epoch=epoch))
        let_go.clear()
    assert (await client.stop_profile(started.profile_id)).state in (
        pb.PROFILE_STATE_EXPORTING,
        pb.PROFILE_STATE_READY,
    )


async def test_a_new_life_knows_how_the_old_one_ended(client: Client, double: EngineDouble) -> None:
    started = await client.start_profile(idempotency_key="k")
    await double.restart()
    assert not (await client.profile()).state.HasField("profile")
    operation = await client.operation(operation_id=started.operation_id)
    assert operation.failed.reason == "ENGINE_RESTARTED"
    replay = await client.start_profile(idempotency_key="k")
    assert (replay.profile_id, replay.state) == (started.profile_id, pb.PROFILE_STATE_FAILED)
    assert (await client.stop_profile(started.profile_id)).state == pb.PROFILE_STATE_FAILED


async def test_what_is_refused(client: Client, double: EngineDouble) -> None:
    revision = (await client.profile()).revision
    for call, code, reason in (
        (client.start_profile(steps=0), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (client.start_profile(duration_ms=0), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (client.start_profile(expected_revision=revision + 1), Code.ABORTED, "REVISION_MISMATCH"),
        (client.start_profile("unspecified"), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (client.start_profile(idempotency_key=""), Code.INVALID_ARGUMENT, None),
        (client.stop_profile(""), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (client.stop_profile("none"), Code.NOT_FOUND, "PROFILE_NOT_FOUND"),
        (
            client.stop_profile("none", expected_revision=revision + 1),
            Code.ABORTED,
            "REVISION_MISMATCH",
        ),
    ):
        seen = await refused(call)
        assert seen.code is code
        assert reason in (None, seen.reason)
    events = await client.order(client.pause())
    seen = await refused(client.stop_profile(events[0].operation_id))
    assert seen.reason == "PROFILE_NOT_FOUND"


async def test_an_engine_without_a_profiler_has_none(ranks3: EngineDouble) -> None:
    from tests.enginekit.client import client_of

    offered = ranks3.engine.offered
    assert OperationKind.PROFILE not in offered.operations
    async with client_of(ranks3) as client:
        seen = await refused(client.stop_profile("x"))
        assert seen.code is Code.UNIMPLEMENTED
