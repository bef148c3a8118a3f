"""New weights: on every rank or on none, under a pause or around one, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from app.domain.kinds import Component, OperationKind, WeightsState
from app.enginekit.runtime import Order
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import Client, Event, assert_whole, refused, until
from tests.enginekit.full_engine import FullEngine, RankState, checksum
from tests.enginekit.minimal_engine import Hook, explode, fault, hang
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


@pytest.fixture
def double(full: EngineDouble) -> EngineDouble:
    return full


def only(kind: OperationKind, hook: Hook) -> Hook:
    async def scripted(order: Order, rank: int) -> None:
        if order.command.kind is kind:
            await hook(order, rank)

    return scripted


def update_only(hook: Hook) -> Hook:
    return only(OperationKind.UPDATE_WEIGHTS, hook)


def phases(engine: FullEngine) -> list[tuple[str, OperationKind]]:
    return [(call.phase, call.kind) for call in engine.calls]


def versions(engine: FullEngine) -> list[str]:
    return [engine.held[rank].version for rank in engine.ranks]


def warned(events: list[Event]) -> list[str]:
    return [event.warning.reason for event in events if event.HasField("warning")]


async def test_an_update_under_a_pause(client: Client, engine: FullEngine) -> None:
    paused = await client.completed(client.pause())
    events = await client.order(client.update("v2"))
    assert_whole(events)
    assert warned(events) == []
    completed = events[-1].completed
    assert completed.verification == pb.VERIFICATION_VERIFIED
    result = completed.update_weights
    assert (result.weight_version, result.previous_weight_version) == ("v2", "v1")
    assert [(one.rank, one.tensors, one.bytes, one.sha256) for one in result.evidence] == [
        (rank, 7, 1000, checksum(rank, "v2")) for rank in (0, 1)
    ]
    assert list(result.confirmed) == [pb.COMPONENT_TARGET]
    assert list(result.unconfirmed) == []
    (flushed,) = result.flushed
    assert (flushed.kind, flushed.blocks_freed) == (pb.CACHE_KIND_PREFIX, 3)
    assert list(result.switched) == [pb.SwitchedRequest(request_id="frozen", output_tokens=5)]
    profile = await client.profile()
    assert (profile.state.weights.version, profile.state.weights.state) == (
        "v2",
        pb.WEIGHTS_STATE_VALID,
    )
    # The pause was not the update's, so it is not the update's to lift.
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    assert profile.pause_epoch == paused.pause.pause_epoch
    # Updating, and valid again.
    assert completed.revision == profile.revision == paused.revision + 2
    stored = await client.operation(operation_id=events[0].operation_id)
    assert stored.completed == completed


@pytest.mark.parametrize("mode", ["drain", "abort", "keep"])
async def test_an_update_that_pauses_by_itself_lifts_that_pause(
    mode: str, client: Client, engine: FullEngine
) -> None:
    before = await client.profile()
    engine.stall()
    running = client.generate("one two three")
    await running.first()
    updating = await client.begin(client.update("v2", pause=mode))
    if mode == "drain":

        async def draining() -> bool:
            return await client.admission() == "draining"

        await until(draining)
        assert versions(engine) == ["v1", "v1"]
        engine.go()
    end = (await updating.end()).completed
    engine.go()
    assert end.verification == pb.VERIFICATION_VERIFIED
    profile = await client.profile()
    assert profile.state.admission == pb.ADMISSION_STATE_OPEN
    assert not profile.state.HasField("pause")
    assert profile.pause_epoch == before.pause_epoch + 1
    assert profile.state.weights.version == "v2"
    expected = "CANCELLED" if mode == "abort" else "LENGTH"
    assert await running.finish_reason() == expected
    assert await client.generate().finish_reason() == "LENGTH"
    stale = await refused(client.stream(client.resume(profile.pause_epoch)))
    assert stale.reason == "NOT_PAUSED"


async def test_it_is_prepared_while_requests_run(client: Client, engine: FullEngine) -> None:
    let_go = asyncio.Event()
    engine.script("prepare", update_only(until_set(let_go)))
    updating = await client.begin(client.update(pause="drain"))
    await until(lambda: engine.calls)
    assert await client.admission() == "open"
    assert await client.generate().finish_reason() == "LENGTH"
    let_go.set()
    assert (await updating.end()).HasField("completed")
    told = [(call.phase, call.kind.value) for call in engine.calls if call.rank == 0]
    assert told == [
        ("prepare", "update_weights"),
        ("prepare", "pause"),
        ("commit", "pause"),
        ("commit", "update_weights"),
        ("prepare", "resume"),
        ("commit", "resume"),
    ]


async def test_held_requests_are_answered_by_the_new_weights(
    client: Client, engine: FullEngine
) -> None:
    let_go = asyncio.Event()
    engine.script("commit", update_only(until_set(let_go)))
    updating = await client.begin(client.update(pause="abort"))
    await until(lambda: ("commit", OperationKind.UPDATE_WEIGHTS) in phases(engine))
    late = client.generate()
    await client.held(1)
    state = (await client.profile()).state
    assert state.admission == pb.ADMISSION_STATE_PAUSED
    assert state.weights.state == pb.WEIGHTS_STATE_UPDATING
    assert state.weights.version == "v1"
    assert engine.started == []
    let_go.set()
    assert (await updating.end()).HasField("completed")
    assert await late.finish_reason() == "LENGTH"


async def test_a_pause_that_was_there_is_left_there(client: Client, engine: FullEngine) -> None:
    paused = await client.completed(client.pause("abort"))
    assert (await client.completed(client.update(pause="drain"))).changed
    profile = await client.profile()
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    assert profile.pause_epoch == paused.pause.pause_epoch


async def test_what_the_admission_rule_refuses(client: Client, engine: FullEngine) -> None:
    seen = await refused(client.stream(client.update()))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "NOT_PAUSED")
    engine.stall()
    running = client.generate()
    await running.first()
    paused = await client.completed(client.pause("keep"))
    seen = await refused(client.stream(client.update(pause="drain")))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "REQUESTS_FROZEN")
    stale = pb.UnderPause(pause_epoch=paused.pause.pause_epoch - 1)
    seen = await refused(client.stream(client.update(under_pause=stale)))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "STALE_PAUSE_EPOCH")
    latest = pb.UnderPause(pause_epoch=paused.pause.pause_epoch)
    assert (await client.completed(client.update(under_pause=latest))).changed
    running.hang_up()


async def test_cached_state_of_older_weights_is_counted(client: Client, engine: FullEngine) -> None:
    async def counted() -> int:
        return (await client.profile()).state.weights.updates_since_flush

    for number in (1, 2):
        events = await client.order(client.update(f"v{number}", pause="drain", cache="keep"))
        assert warned(events) == ["CACHE_KEPT"]
        assert events[-1].completed.update_weights.updates_since_flush == number
        assert list(events[-1].completed.update_weights.flushed) == []
        assert await counted() == number
    engine.stall()
    running = client.generate()
    await running.first()
    before = await client.profile()
    assert not (await client.completed(client.flush())).changed  # blocks are still in use
    assert await counted() == 2
    engine.go()
    await running.end()
    engine.cached_blocks = 0
    cleaned = await client.completed(client.flush())
    assert cleaned.changed
    assert cleaned.revision == before.revision + 1
    assert await counted() == 0
    await client.completed(client.update("v3", pause="drain", cache="keep"))
    await client.completed(client.update("v4", pause="drain", cache="flush"))
    assert await counted() == 0
    await client.completed(client.update("v5", pause="drain", cache="keep"))
    await client.completed(client.release("kv_cache", content="discard"))
    assert await counted() == 0


@pytest.mark.parametrize("hook", [fault, explode], ids=["fault", "unexpected"])
async def test_what_cannot_be_prepared_disturbs_nobody(
    hook: Hook, client: Client, engine: FullEngine
) -> None:
    before = await client.profile()
    engine.script("prepare", update_only(hook), 1)
    engine.stall()
    running = client.generate()
    await running.first()
    events = await client.order(client.update(pause="abort"))
    assert_whole(events)
    failed = events[-1].failed
    assert (list(failed.ranks), failed.effect) == ([1], pb.FAILURE_EFFECT_NONE)
    after = await client.profile()
    assert (after.revision, after.pause_epoch) == (before.revision, before.pause_epoch)
    engine.go()
    assert await running.finish_reason() == "LENGTH"
    assert engine.prepared == {}


@pytest.mark.parametrize("around", [None, "drain"])
@pytest.mark.parametrize("phase", ["commit", "conclude"])
async def test_a_rank_that_does_not_commit_leaves_the_old_weights(
    phase: str, around: str | None, client: Client, engine: FullEngine
) -> None:
    if around is None:
        await client.completed(client.pause())
    before = await client.profile()
    engine.script(phase, update_only(fault), -1 if phase == "conclude" else 1)
    events = await client.order(client.update(pause=around))
    assert_whole(events)
    failed = events[-1].failed
    assert (failed.reason, failed.effect) == ("RANK_BROKEN", pb.FAILURE_EFFECT_ROLLED_BACK)
    if phase == "commit":
        assert list(failed.ranks) == [1]
    assert versions(engine) == ["v1", "v1"]
    after = await client.profile()
    assert (after.state.weights.version, after.state.weights.state) == (
        "v1",
        pb.WEIGHTS_STATE_VALID,
    )
    assert after.state.admission == before.state.admission
    # Paused where it did so itself; updating; and back.
    assert failed.revision == after.revision == before.revision + (3 if around else 2)
    operation = await client.operation(operation_id=events[0].operation_id)
    assert [report.state for report in operation.ranks] == [pb.RANK_STATE_ROLLED_BACK] * 2
    engine.scripts.clear()
    if around is not None:
        assert await client.generate().finish_reason() == "LENGTH"
    assert (await client.completed(client.update(pause="drain"))).changed


async def test_what_is_not_rolled_back_is_out_of_service_until_a_full_update(
    client: Client, engine: FullEngine
) -> None:
    engine.script("commit", update_only(fault), 1)
    engine.script("rollback", update_only(fault), 0)
    events = await client.order(client.update("v2", pause="drain"))
    assert_whole(events)
    assert [e.warning.reason for e in events if e.HasField("warning")] == ["PAUSE_NOT_LIFTED"]
    failed = events[-1].failed
    assert (list(failed.ranks), failed.effect) == ([0, 1], pb.FAILURE_EFFECT_APPLIED_IN_PART)
    profile = await client.profile()
    assert profile.state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED  # its own pause, and it stays
    assert await client.health("openengine.v1.Inference") == "NOT_SERVING"
    seen = await refused(client.stream(client.resume(profile.pause_epoch)))
    assert seen.reason == "WEIGHTS_NOT_VALID"
    engine.scripts.clear()
    part = client.update("v3", disk=pb.DiskWeights(path="/part"))
    assert (await client.failed(part)).reason == "PARTIAL_UPDATE"
    assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
    assert (await client.completed(client.update("v4"))).changed
    profile = await client.profile()
    assert (profile.state.weights.state, profile.state.weights.version) == (
        pb.WEIGHTS_STATE_VALID,
        "v4",
    )
    assert list(profile.state.ranks) == []
    assert (await client.completed(client.resume(profile.pause_epoch))).changed
    assert await client.generate().finish_reason() == "LENGTH"


async def test_an_update_brings_back_what_was_discarded(client: Client, engine: FullEngine) -> None:
    released = await client.completed(client.release("weights", content="discard"))
    seen = await refused(client.stream(client.update()))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "RESOURCES_RELEASED")
    await client.completed(
        client.restore("weights", epoch=released.release_resources.release_epoch)
    )
    part = client.update(disk=pb.DiskWeights(path="/part"))
    assert (await client.failed(part)).reason == "PARTIAL_UPDATE"
    await client.completed(client.update("v2"))
    profile = await client.profile()
    assert profile.state.weights.state == pb.WEIGHTS_STATE_VALID
    assert (await client.completed(client.resume(profile.pause_epoch))).changed
    # When nothing is wrong, a part is enough.
    assert (
        await client.completed(client.update(disk=pb.DiskWeights(path="/part"), pause="keep"))
    ).changed


async def test_a_failing_rank_is_told_while_others_hang(client: Client, engine: FullEngine) -> None:
    engine.script("commit", update_only(hang), 0)
    engine.script("commit", update_only(fault), 1)
    async with asyncio.timeout(30):  # and not the deadline of the order
        events = await client.order(client.update(pause="drain"))
    failed = events[-1].failed
    assert (failed.message, list(failed.ranks)) == ("rank 1 cannot", [0, 1])
    assert await client.admission() == "open"
    assert versions(engine) == ["v1", "v1"]


@pytest.mark.parametrize("phase", ["prepare", "commit"])
async def test_a_deadline_ends_what_hangs(phase: str, client: Client, engine: FullEngine) -> None:
    engine.script(phase, update_only(hang), 1)
    failed = await client.failed(client.update(pause="drain", deadline_ms=200))
    assert (failed.reason, list(failed.ranks)) == ("DEADLINE_EXCEEDED", [1])
    assert await client.admission() == "open"
    assert await client.generate().finish_reason() == "LENGTH"


async def test_its_preparation_and_its_drain_can_be_cancelled(
    client: Client, engine: FullEngine
) -> None:
    before = await client.profile()
    engine.script("prepare", update_only(hang))
    updating = await client.begin(client.update(pause="drain"))
    await until(lambda: engine.calls)
    await client.cancel(updating.events[0].operation_id)
    assert (await updating.end()).HasField("cancelled")
    engine.scripts.clear()
    engine.stall()
    running = client.generate()
    await running.first()
    updating = await client.begin(client.update(pause="drain"))

    async def draining() -> bool:
        return await client.admission() == "draining"

    await until(draining)
    await client.cancel(updating.events[0].operation_id)
    assert (await updating.end()).HasField("cancelled")
    engine.go()
    assert await running.finish_reason() == "LENGTH"
    profile = await client.profile()
    assert profile.pause_epoch == before.pause_epoch
    assert versions(engine) == ["v1", "v1"]
    assert engine.prepared == {}


async def test_an_engine_that_does_not_cancel_says_so(client: Client, engine: FullEngine) -> None:
    engine.offered = replace(engine.offered, cancellable=frozenset())
    let_go = asyncio.Event()
    engine.script("prepare", update_only(until_set(let_go)))
    updating = await client.begin(client.update(pause="drain"))
    asked = client.admin.CancelOperation(
        pb.CancelAdminOperationRequest(operation_id=updating.events[0].operation_id), timeout=10
    )
    assert (await refused(asked)).reason == "NOT_CANCELLABLE"
    let_go.set()
    assert (await updating.end()).HasField("completed")


async def test_a_pause_that_fails_takes_the_update_back(client: Client, engine: FullEngine) -> None:
    engine.script("commit", only(OperationKind.PAUSE, fault), 1)
    events = await client.order(client.update(pause="keep"))
    assert_whole(events)
    assert (events[-1].failed.reason, list(events[-1].failed.ranks)) == ("RANK_BROKEN", [1])
    assert await client.admission() == "open"
    assert (versions(engine), engine.prepared) == (["v1", "v1"], {})


async def test_new_weights_that_cannot_be_served_yet_are_new_all_the_same(
    client: Client, engine: FullEngine
) -> None:
    engine.script("commit", only(OperationKind.RESUME, fault), 1)
    events = await client.order(client.update("v2", pause="drain"))
    assert_whole(events)
    assert warned(events) == ["PAUSE_NOT_LIFTED"]
    assert events[-1].completed.verification == pb.VERIFICATION_VERIFIED
    operation = await client.operation(operation_id=events[0].operation_id)
    assert [report.state for report in operation.ranks] == [pb.RANK_STATE_COMMITTED] * 2
    profile = await client.profile()
    assert profile.state.weights.version == "v2"
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    engine.scripts.clear()
    assert (await client.completed(client.resume(profile.pause_epoch))).changed


async def test_ranks_lost_over_the_resume_are_not_a_success(
    client: Client, engine: FullEngine
) -> None:
    engine.script("commit", only(OperationKind.RESUME, fault), 1)
    engine.script("rollback", only(OperationKind.RESUME, fault), 1)
    failed = await client.failed(client.update("v2", pause="drain"))
    assert list(failed.ranks) == [1]
    state = (await client.profile()).state
    assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
    assert state.admission == pb.ADMISSION_STATE_PAUSED


@pytest.mark.parametrize(
    ("spoil", "reasons"),
    [
        (lambda engine: engine.silent.add(1), ["NOT_VERIFIED"]),
        (
            lambda engine: setattr(engine, "confirms", frozenset({Component.TARGET})),
            ["COMPONENT_UNCONFIRMED", "NOT_VERIFIED"],
        ),
        (
            lambda engine: engine.weights_become(WeightsState.UNKNOWN),
            ["NOT_VERIFIED"],
        ),
    ],
)
async def test_what_is_not_proved_is_not_called_verified(
    spoil: Callable[[FullEngine], Any],
    reasons: list[str],
    client: Client,
    engine: FullEngine,
) -> None:
    spoil(engine)
    order = client.update("v2", pause="drain", components=[pb.COMPONENT_TARGET, pb.COMPONENT_DRAFT])
    events = await client.order(order)
    assert_whole(events)
    assert warned(events) == reasons
    completed = events[-1].completed
    assert completed.verification == pb.VERIFICATION_UNVERIFIED
    unconfirmed = [pb.COMPONENT_DRAFT] if "COMPONENT_UNCONFIRMED" in reasons else []
    assert list(completed.update_weights.unconfirmed) == unconfirmed
    assert (await client.profile()).state.weights.version == "v2"


async def test_a_store_that_is_gone_for_a_moment_leaves_no_half_update(
    client: Client, double: EngineDouble, engine: FullEngine
) -> None:
    """Between the pause and the commit nothing can be written: the update is taken back."""
    journal: Any = double.server._running().state.journal
    write = journal._write
    failures: list[int] = []

    async def fail_once(work: Any) -> None:
        waiting = any(call.phase == "conclude" for call in engine.calls)
        if waiting and not failures:
            failures.append(1)
            from app.enginekit.refusals import StoreUnavailable

            raise StoreUnavailable("gone")
        await write(work)

    journal._write = fail_once
    events = await client.order(client.update(pause="drain"))
    assert_whole(events)
    assert failures
    assert events[-1].failed.reason == "INTERNAL"
    assert versions(engine) == ["v1", "v1"]
    assert engine.held == dict.fromkeys((0, 1), RankState())
    assert engine.paused is None
    assert await client.admission() == "open"
    assert await client.generate().finish_reason() == "LENGTH"
