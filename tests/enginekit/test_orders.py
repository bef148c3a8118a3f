"""Orders before their acceptance: every status with its reason; and what an acceptance brings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.domain.capabilities import Capabilities
from app.domain.kinds import OperationKind, PauseMode
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, assert_whole, client_of, refused, shape
from tests.enginekit.minimal_engine import MinimalEngine, until

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


async def test_an_order_is_accepted_reported_and_completed(
    client: Client, double: EngineDouble
) -> None:
    await client.generate().end()
    before = await client.profile()
    events = await client.order(client.flush(idempotency_key="k"))
    assert_whole(events)
    assert shape(events) == ["accepted", "rank", "rank", "completed"]
    accepted, completed = events[0].accepted, events[-1].completed
    assert accepted.kind == pb.ADMIN_OPERATION_KIND_FLUSH_CACHES
    assert accepted.instance_id == double.instance_id == before.instance_id
    assert accepted.revision == before.revision
    assert completed.changed
    assert completed.revision == before.revision + 1 == (await client.profile()).revision
    assert completed.verification == pb.VERIFICATION_VERIFIED
    (cache,) = completed.flush_caches.caches
    assert (cache.kind, cache.blocks_freed, cache.blocks_in_use) == (pb.CACHE_KIND_PREFIX, 1, 0)
    times = [event.time_unix_nanos for event in events]
    assert times == sorted(times)


async def test_what_changes_nothing_raises_no_revision(client: Client) -> None:
    before = (await client.profile()).revision
    completed = await client.completed(client.flush())
    assert not completed.changed
    assert completed.revision == before == (await client.profile()).revision


def pause(**fields: Any) -> pb.PauseRequest:
    """Untyped, so that numbers which are in no enum can be sent."""
    return pb.PauseRequest(**fields)


def flush(**fields: Any) -> pb.FlushCachesRequest:
    return pb.FlushCachesRequest(**fields)


MALFORMED: dict[str, tuple[Any, str, str]] = {
    "no key": (
        pause(mode=pb.PAUSE_MODE_DRAIN),
        "IDEMPOTENCY_KEY_MALFORMED",
        "idempotency_key",
    ),
    "long key": (
        pause(idempotency_key="x" * 129, mode=pb.PAUSE_MODE_DRAIN),
        "IDEMPOTENCY_KEY_MALFORMED",
        "idempotency_key",
    ),
    "key not ASCII": (
        pause(idempotency_key="é", mode=pb.PAUSE_MODE_DRAIN),
        "IDEMPOTENCY_KEY_MALFORMED",
        "idempotency_key",
    ),
    "no mode": (pause(idempotency_key="k"), "INVALID_ARGUMENT", "mode"),
    "unknown mode": (pause(idempotency_key="k", mode=99), "INVALID_ARGUMENT", "mode"),
    "unspecified rule": (
        pause(idempotency_key="k", mode=1, new_requests=0),
        "INVALID_ARGUMENT",
        "new_requests",
    ),
    "unknown rule": (
        pause(idempotency_key="k", mode=1, new_requests=77),
        "INVALID_ARGUMENT",
        "new_requests",
    ),
    "limit of nothing held": (
        pause(idempotency_key="k", mode=1, new_requests=2, hold_limit_ms=5),
        "INVALID_ARGUMENT",
        "hold_limit_ms",
    ),
    "zero hold limit": (
        pause(idempotency_key="k", mode=1, hold_limit_ms=0),
        "INVALID_ARGUMENT",
        "hold_limit_ms",
    ),
    "hold limit above the maximum": (
        pause(idempotency_key="k", mode=1, hold_limit_ms=10**9),
        "INVALID_ARGUMENT",
        "hold_limit_ms",
    ),
    "zero deadline": (
        pause(idempotency_key="k", mode=1, deadline_ms=0),
        "INVALID_ARGUMENT",
        "deadline_ms",
    ),
    "deadline above the maximum": (
        pause(idempotency_key="k", mode=1, deadline_ms=10**9),
        "INVALID_ARGUMENT",
        "deadline_ms",
    ),
    "empty model": (
        pause(idempotency_key="k", mode=1, model=""),
        "INVALID_ARGUMENT",
        "model",
    ),
    "foreign model": (
        pause(idempotency_key="k", mode=1, model="other"),
        "INVALID_ARGUMENT",
        "model",
    ),
    "no cache": (flush(idempotency_key="k"), "INVALID_ARGUMENT", "caches"),
    "unspecified cache": (
        flush(idempotency_key="k", caches=[1, 0]),
        "INVALID_ARGUMENT",
        "caches[1]",
    ),
    "unknown cache": (
        flush(idempotency_key="k", caches=[42]),
        "INVALID_ARGUMENT",
        "caches[0]",
    ),
    "a cache twice": (
        flush(idempotency_key="k", caches=[1, 1]),
        "INVALID_ARGUMENT",
        "caches",
    ),
    "no epoch": (pb.ResumeRequest(idempotency_key="k"), "INVALID_ARGUMENT", "pause_epoch"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_orders_are_refused(
    name: str, client: Client, double: EngineDouble
) -> None:
    request, reason, field = MALFORMED[name]
    seen = await refused(client.stream(request))
    assert (seen.code, seen.reason, seen.domain) == (Code.INVALID_ARGUMENT, reason, "chadburn")
    assert seen.fields == (field,)
    assert seen.metadata["retryable"] == "false"
    assert double.orders == []


async def test_a_field_from_the_future_is_refused_and_not_left_out(client: Client) -> None:
    order = client.pause()
    newer = pb.PauseRequest.FromString(order.SerializeToString() + b"\xfa\x06\x01x")
    seen = await refused(client.stream(newer))
    assert seen.code is Code.INVALID_ARGUMENT
    target = pause(idempotency_key="k", mode=1)
    target.whole_engine.MergeFromString(b"\xfa\x06\x01x")
    assert (await refused(client.stream(target))).code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "request_type",
    [
        pb.ReleaseResourcesRequest,
        pb.RestoreResourcesRequest,
        pb.UpdateWeightsRequest,
        pb.StartProfileRequest,
        pb.StopProfileRequest,
        pb.ReconfigureServingRequest,
    ],
)
async def test_what_is_in_no_profile_is_unimplemented(request_type: Any, client: Client) -> None:
    seen = await refused(client.stream(request_type()))
    assert (seen.code, seen.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_OPERATION")
    offered = {row.kind for row in (await client.profile()).operations}
    assert offered == {1, 2, 3, 11}


async def test_what_this_engine_does_not_offer_is_unimplemented(tmp_path: Path) -> None:
    def lean() -> MinimalEngine:
        engine = MinimalEngine()
        engine.offered = Capabilities(
            operations=frozenset({OperationKind.PAUSE, OperationKind.SHUTDOWN}),
            pause_modes=frozenset({PauseMode.ABORT}),
        )
        return engine

    async with running_engine(tmp_path, make_engine=lean) as double, client_of(double) as client:
        for order in (client.flush(), client.resume(1), client.pause("drain")):
            seen = await refused(client.stream(order))
            assert (seen.code, seen.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_OPERATION")
        profile = await client.profile()
        # An operation that the kit cannot carry out is not advertised for it.
        assert [row.kind for row in profile.operations] == [pb.ADMIN_OPERATION_KIND_PAUSE]
        assert (await client.completed(client.pause("abort"))).changed


async def test_an_engine_of_several_models_is_told_which_is_meant(tmp_path: Path) -> None:
    def two() -> MinimalEngine:
        return MinimalEngine(models=("a", "b"))

    async with running_engine(tmp_path, make_engine=two) as double, client_of(double) as client:
        seen = await refused(client.stream(client.flush()))
        assert (seen.code, seen.fields) == (Code.INVALID_ARGUMENT, ("model",))
        assert await client.order(client.flush(model="b"))
        assert await client.order(client.flush(whole_engine=pb.WholeEngine()))
        seen = await refused(client.stream(client.pause(model="a")))
        assert seen.code is Code.UNIMPLEMENTED
        assert await client.order(client.pause(whole_engine=pb.WholeEngine()))


async def test_a_revision_that_is_not_current_aborts(client: Client, double: EngineDouble) -> None:
    current = (await client.profile()).revision
    seen = await refused(client.stream(client.pause(expected_revision=current + 1)))
    assert (seen.code, seen.reason) == (Code.ABORTED, "REVISION_MISMATCH")
    assert seen.metadata["current_revision"] == str(current)
    assert double.orders == []
    assert (await client.completed(client.pause(expected_revision=current))).changed


async def test_the_running_exclusive_operation_is_named(
    client: Client, double: EngineDouble
) -> None:
    let_go = asyncio.Event()
    double.engine.script("prepare", until(let_go))
    running = await client.begin(client.flush(idempotency_key="first"))
    operation_id = running.events[0].operation_id
    seen = await refused(client.stream(client.flush()))
    assert (seen.code, seen.reason) == (Code.ABORTED, "ENGINE_BUSY")
    assert seen.metadata["operation_id"] == operation_id
    assert seen.metadata["idempotency_key"] == "first"
    assert seen.metadata["retryable"] == "true"
    (opened,) = (await client.profile()).state.open_operations
    assert (opened.operation_id, opened.state) == (
        operation_id,
        pb.ADMIN_OPERATION_STATE_RUNNING,
    )
    let_go.set()
    assert (await running.end()).HasField("completed")
    assert (await client.profile()).state.open_operations == []


async def test_the_order_of_checks(client: Client, double: EngineDouble) -> None:
    """Syntax, replay, capability, revision, epoch and state, busy."""
    done = client.flush(idempotency_key="done")
    await client.order(done)
    let_go = asyncio.Event()
    double.engine.script("prepare", until(let_go))
    running = await client.begin(client.flush())
    # A replay wins over everything that would refuse a new order.
    replay = pb.FlushCachesRequest()
    replay.CopyFrom(done)
    assert shape(await client.order(replay))[-1] == "completed"
    reuse = client.flush(idempotency_key="done", expected_revision=999, caches=[2])
    assert (await refused(client.stream(reuse))).code is Code.ALREADY_EXISTS
    unsupported = client.flush(expected_revision=999, caches=[2])
    assert (await refused(client.stream(unsupported))).code is Code.UNIMPLEMENTED
    mismatch = client.resume(999, expected_revision=999)
    assert (await refused(client.stream(mismatch))).reason == "REVISION_MISMATCH"
    stale = client.resume(999)
    assert (await refused(client.stream(stale))).reason == "STALE_PAUSE_EPOCH"
    assert (await refused(client.stream(client.pause()))).reason == "ENGINE_BUSY"
    let_go.set()
    assert (await running.end()).HasField("completed")


async def test_operations_are_found_by_id_and_by_key(client: Client) -> None:
    events = await client.order(client.pause(idempotency_key="by key"))
    operation_id = events[0].operation_id
    found = await client.operation(operation_id=operation_id)
    assert found == await client.operation(idempotency_key="by key")
    assert found.state == pb.ADMIN_OPERATION_STATE_SUCCEEDED
    assert found.completed == events[-1].completed
    assert found.last_sequence == len(events)
    assert 0 < found.created_unix_nanos <= found.started_unix_nanos <= found.ended_unix_nanos
    assert [(report.rank, report.state) for report in found.ranks] == [(0, pb.RANK_STATE_COMMITTED)]


async def test_an_operation_that_is_not_there(client: Client) -> None:
    for lookup in ({"operation_id": "none"}, {"idempotency_key": "none"}):
        seen = await refused(
            client.admin.GetOperation(pb.GetAdminOperationRequest(**lookup), timeout=10)
        )
        assert (seen.code, seen.reason) == (Code.NOT_FOUND, "OPERATION_NOT_FOUND")
    for request in (
        pb.GetAdminOperationRequest(),
        pb.GetAdminOperationRequest(operation_id=""),
        pb.GetAdminOperationRequest(idempotency_key=""),
    ):
        seen = await refused(client.admin.GetOperation(request, timeout=10))
        assert seen.code is Code.INVALID_ARGUMENT
