"""Memory given back and taken again: the released set, its epoch, and what becomes of requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.domain.capabilities import Capabilities
from app.domain.kinds import ContentPolicy, DrainRule, OperationKind, PauseMode, ResourceKind
from app.enginekit.runtime import Order
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, assert_whole, client_of, refused, until
from tests.enginekit.full_engine import FullEngine
from tests.enginekit.minimal_engine import MinimalEngine, fault, hang
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
KV, WEIGHTS = pb.RESOURCE_KIND_KV_CACHE, pb.RESOURCE_KIND_WEIGHTS


@pytest.fixture
def double(full: EngineDouble) -> EngineDouble:
    return full


def engine_of(double: EngineDouble) -> FullEngine:
    assert isinstance(double.engine, FullEngine)
    return double.engine


async def test_released_is_a_set_that_is_restored_in_stages(
    client: Client, double: EngineDouble
) -> None:
    before = await client.profile()
    events = await client.order(client.release("kv_cache"))
    assert_whole(events)
    first = events[-1].completed
    assert first.changed
    assert first.verification == pb.VERIFICATION_VERIFIED
    result = first.release_resources
    assert (result.release_epoch, list(result.released)) == (before.release_epoch + 1, [KV])
    assert [(m.rank, m.resource, m.bytes_before, m.bytes_after) for m in result.memory] == [
        (0, KV, 500, 0),
        (1, KV, 500, 0),
    ]
    second = await client.completed(client.release("weights", "kv_cache"))
    assert list(second.release_resources.released) == [WEIGHTS, KV]
    assert {held.resource for held in second.release_resources.memory} == {WEIGHTS}
    epoch = second.release_resources.release_epoch
    assert epoch == result.release_epoch + 1
    profile = await client.profile()
    assert (profile.release_epoch, profile.revision) == (epoch, second.revision)
    assert list(profile.state.released) == [WEIGHTS, KV]
    # Closed by a pause that names the release, and that the second one found in force.
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    assert profile.state.pause.operation_id == events[0].operation_id
    assert profile.state.pause.epoch == profile.pause_epoch == before.pause_epoch + 1
    assert await client.health("openengine.v1.Inference") == "NOT_SERVING"

    stale = await refused(client.stream(client.restore("kv_cache", epoch=epoch - 1)))
    assert (stale.code, stale.reason) == (Code.FAILED_PRECONDITION, "STALE_RELEASE_EPOCH")
    assert stale.metadata["current_release_epoch"] == str(epoch)
    seen = await refused(client.stream(client.resume(profile.pause_epoch)))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "RESOURCES_RELEASED")

    restored = await client.completed(client.restore("weights", epoch=epoch))
    assert list(restored.restore_resources.released) == [KV]
    assert {(m.bytes_before, m.bytes_after) for m in restored.restore_resources.memory} == {
        (0, 1000)
    }
    again = await client.completed(client.restore("weights", "kv_cache", epoch=epoch))
    assert (again.changed, list(again.restore_resources.released)) == (True, [])
    assert again.revision == restored.revision + 1
    # Restoring never opens admission.
    assert await client.admission() == "paused"
    assert (await client.completed(client.resume(profile.pause_epoch))).changed
    assert await client.generate().finish_reason() == "LENGTH"


async def test_what_changes_nothing_does_not_reach_the_ranks(
    client: Client, double: EngineDouble
) -> None:
    first = await client.completed(client.release("kv_cache", content="discard"))
    epoch = first.release_resources.release_epoch
    calls = len(double.calls)
    for order in (
        client.release("kv_cache", content="discard"),
        client.release("kv_cache", content="preserve", drain="refuse"),
        client.restore("weights", epoch=epoch),
    ):
        again = await client.completed(order)
        assert not again.changed
        assert again.revision == first.revision
    assert len(double.calls) == calls
    assert (await client.profile()).release_epoch == epoch


async def test_what_was_preserved_can_still_be_discarded(
    client: Client, double: EngineDouble
) -> None:
    await client.completed(client.release("weights"))
    state = (await client.profile()).state
    assert state.weights.state == pb.WEIGHTS_STATE_VALID
    gone = await client.completed(client.release("weights", content="discard"))
    assert gone.changed
    assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_MISSING


async def test_discarded_weights_are_missing_also_after_a_restore(
    client: Client, double: EngineDouble
) -> None:
    released = await client.completed(client.release("weights", content="discard"))
    epoch = released.release_resources.release_epoch
    assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_MISSING
    await client.completed(client.restore("weights", epoch=epoch))
    profile = await client.profile()
    assert profile.state.weights.state == pb.WEIGHTS_STATE_MISSING
    seen = await refused(client.stream(client.resume(profile.pause_epoch)))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "WEIGHTS_NOT_VALID")


async def test_wait_lets_requests_finish_first(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    releasing = await client.begin(client.release("kv_cache"))
    await releasing.next()
    assert await client.admission() == "draining"
    assert engine_of(double).held[0].released == frozenset()
    double.engine.go()
    end = await releasing.end()
    assert end.completed.release_resources.requests_finished == 1
    assert await running.finish_reason() == "LENGTH"


async def test_abort_ends_requests_first(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    end = await client.completed(client.release("kv_cache", drain="abort"))
    assert end.release_resources.requests_aborted == 1
    assert await running.finish_reason() == "CANCELLED"
    assert (await client.profile()).state.pause.mode == pb.PAUSE_MODE_ABORT


async def test_refuse_touches_no_request(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    seen = await refused(client.stream(client.release("kv_cache", drain="refuse")))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "REQUESTS_IN_FLIGHT")
    assert seen.metadata["retryable"] == "true"
    assert double.orders == []
    double.engine.go()
    assert await running.finish_reason() == "LENGTH"
    assert (await client.completed(client.release("kv_cache", drain="refuse"))).changed


async def test_a_request_that_slips_in_makes_a_refusing_release_fail(
    client: Client, double: EngineDouble
) -> None:
    """Between the judging and the closing of the gate."""
    state = double.server._running().state  # the moment cannot be hit from outside
    close = state.gate.close
    calls: list[Any] = []

    def let_one_in(rule: Any) -> None:
        if not calls:
            calls.append(rule)
            state.gate._gate.arrive("late")
        close(rule)

    state.gate.close = let_one_in  # type: ignore[method-assign]
    events = await client.order(client.release("kv_cache", drain="refuse"))
    failed = events[-1].failed
    assert (failed.code, failed.reason) == (
        Code.FAILED_PRECONDITION.value[0],
        "REQUESTS_IN_FLIGHT",
    )
    assert (failed.effect, failed.retryable) == (pb.FAILURE_EFFECT_NONE, True)
    state.gate._gate.leave("late")
    assert await client.admission() == "open"
    assert await client.generate().finish_reason() == "LENGTH"


async def test_frozen_requests_stay_frozen_or_are_ended_but_never_lose_their_content(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    running = client.generate("one two three")
    await running.first()
    paused = await client.completed(client.pause("keep"))
    seen = await refused(client.stream(client.release("kv_cache", content="discard")))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "REQUESTS_FROZEN")
    seen = await refused(client.stream(client.release("kv_cache", drain="refuse")))
    assert seen.reason == "REQUESTS_IN_FLIGHT"
    kept = await client.completed(client.release("kv_cache"))
    assert kept.release_resources.requests_aborted == 0
    profile = await client.profile()
    assert profile.state.pause.mode == pb.PAUSE_MODE_KEEP
    assert profile.pause_epoch == paused.pause.pause_epoch
    assert profile.state.pause.requests_kept == 1
    ended = await client.completed(client.release("weights", drain="abort"))
    assert ended.release_resources.requests_aborted == 1
    assert await running.finish_reason() == "CANCELLED"


async def test_requests_that_cannot_be_ended_keep_their_memory(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    await client.completed(client.pause("keep"))
    double.engine.stuck = True
    failed = await client.failed(client.release("kv_cache", drain="abort"))
    assert (failed.reason, failed.effect) == ("REQUESTS_NOT_ENDED", pb.FAILURE_EFFECT_NONE)
    assert engine_of(double).held[0].released == frozenset()


@pytest.mark.parametrize("phase", ["prepare", "commit", "conclude"])
async def test_a_failed_release_opens_admission_again(
    phase: str, client: Client, double: EngineDouble
) -> None:
    before = await client.profile()
    rank = -1 if phase == "conclude" else 1

    async def only_release(order: Order, at: int) -> None:
        if order.command.kind is OperationKind.RELEASE_RESOURCES:
            await fault(order, at)

    double.engine.script(phase, only_release, rank)
    events = await client.order(client.release("kv_cache"))
    assert_whole(events)
    failed = events[-1].failed
    assert failed.reason == "RANK_BROKEN"
    after = await client.profile()
    assert after.state.admission == pb.ADMISSION_STATE_OPEN
    assert list(after.state.released) == []
    assert after.release_epoch == before.release_epoch
    # It was paused for a while, which is a fact with an epoch.
    assert after.pause_epoch == before.pause_epoch + 1
    assert failed.revision == after.revision == before.revision + 2
    assert double.engine.paused is None
    assert await client.generate().finish_reason() == "LENGTH"


async def test_a_failed_release_stays_closed_where_the_ranks_do_not_resume(
    client: Client, double: EngineDouble
) -> None:
    async def never_again(order: Order, rank: int) -> None:
        if order.command.kind is not OperationKind.PAUSE:
            await fault(order, rank)

    double.engine.script("prepare", never_again, 1)
    events = await client.order(client.release("kv_cache"))
    assert_whole(events)
    assert events[-1].failed.reason == "RANK_BROKEN"
    assert [event.warning.reason for event in events if event.HasField("warning")] == [
        "PAUSE_NOT_LIFTED"
    ]
    profile = await client.profile()
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    double.engine.scripts.clear()
    assert (await client.completed(client.resume(profile.pause_epoch))).changed


async def test_a_release_that_half_the_ranks_cannot_undo_is_out_of_service(
    client: Client, double: EngineDouble
) -> None:
    async def only_release(order: Order, rank: int) -> None:
        if order.command.kind is OperationKind.RELEASE_RESOURCES:
            await fault(order, rank)

    double.engine.script("commit", only_release, 1)
    double.engine.script("rollback", only_release, 0)
    failed = await client.failed(client.release("kv_cache"))
    assert list(failed.ranks) == [0, 1]
    assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
    state = (await client.profile()).state
    assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
    assert state.admission == pb.ADMISSION_STATE_PAUSED


async def test_a_dead_rank_is_told_at_once_and_ends_those_that_wait_for_it(
    client: Client, double: EngineDouble
) -> None:
    async def dies(order: Order, rank: int) -> None:
        if order.command.kind is OperationKind.RELEASE_RESOURCES:
            await (fault if rank == 1 else hang)(order, rank)

    double.engine.script("commit", dies)
    async with asyncio.timeout(30):  # and not the deadline of the order
        events = await client.order(client.release("kv_cache"))
    told = [(e.rank.rank, e.rank.state) for e in events if e.HasField("rank")]
    assert told[-4:] == [
        (1, pb.RANK_STATE_FAILED),
        (0, pb.RANK_STATE_FAILED),
        (0, pb.RANK_STATE_ROLLED_BACK),
        (1, pb.RANK_STATE_ROLLED_BACK),
    ]
    failed = events[-1].failed
    assert (failed.reason, failed.message) == ("RANK_BROKEN", "rank 1 cannot")
    assert list(failed.ranks) == [0, 1]
    assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
    assert await client.admission() == "open"


async def test_a_deadline_does_not_hide_the_rank_that_failed(
    tmp_path: Path,
) -> None:
    async with (
        running_engine(
            tmp_path, make_engine=lambda: FullEngine(world_size=2), straggler_s=60
        ) as double,
        client_of(double) as client,
    ):
        double.engine.script("commit", hang, 0)
        double.engine.script("commit", fault, 1)
        failed = await client.failed(client.pause(deadline_ms=200))
        assert (failed.reason, list(failed.ranks)) == ("RANK_BROKEN", [0, 1])


async def test_a_runtime_that_says_otherwise_is_not_verified(
    client: Client, double: EngineDouble
) -> None:
    engine = engine_of(double)
    engine.frozen_view = await engine.observe()
    events = await client.order(client.release("kv_cache"))
    assert_whole(events)
    assert events[-1].completed.verification == pb.VERIFICATION_UNVERIFIED
    assert [event.warning.reason for event in events if event.HasField("warning")] == [
        "NOT_VERIFIED"
    ]


async def test_nothing_of_an_order_is_told_before_its_end(
    client: Client, double: EngineDouble
) -> None:
    let_go = asyncio.Event()
    double.engine.script("conclude", until_set(let_go))
    let_go.set()
    paused = await client.completed(client.pause())
    let_go.clear()
    releasing = await client.begin(client.release("kv_cache"))
    await until(lambda: engine_of(double).held[1].released)
    profile = await client.profile()
    assert list(profile.state.released) == []
    assert profile.revision == paused.revision
    let_go.set()
    end = (await releasing.end()).completed
    assert end.revision == paused.revision + 1 == (await client.profile()).revision


async def test_everything_is_as_at_the_start_in_a_new_life(
    client: Client, double: EngineDouble
) -> None:
    released = await client.completed(client.release("weights", content="discard"))
    await double.restart()
    profile = await client.profile()
    assert profile.release_epoch > released.release_resources.release_epoch
    assert list(profile.state.released) == []
    assert profile.state.admission == pb.ADMISSION_STATE_OPEN
    assert profile.state.weights.state == pb.WEIGHTS_STATE_VALID
    epoch = released.release_resources.release_epoch
    stale = await refused(client.stream(client.restore("weights", epoch=epoch)))
    assert stale.reason == "STALE_RELEASE_EPOCH"


def release(**fields: Any) -> pb.ReleaseResourcesRequest:
    """Untyped, so that numbers which are in no enum can be sent."""
    return pb.ReleaseResourcesRequest(idempotency_key="k", **fields)


def restore(**fields: Any) -> pb.RestoreResourcesRequest:
    return pb.RestoreResourcesRequest(idempotency_key="k", **fields)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (release(content=1, drain=1), "resources"),
        (release(resources=[1, 0], content=1, drain=1), "resources[1]"),
        (release(resources=[1, 77], content=1, drain=1), "resources[1]"),
        (release(resources=[1, 1], content=1, drain=1), "resources"),
        (release(resources=[1], drain=1), "content"),
        (release(resources=[1], content=1), "drain"),
        (restore(release_epoch=1), "resources"),
        (restore(resources=[1]), "release_epoch"),
    ],
)
async def test_malformed_orders_are_refused(
    request_: Any, field: str, client: Client, double: EngineDouble
) -> None:
    seen = await refused(client.stream(request_))
    assert (seen.code, seen.fields) == (Code.INVALID_ARGUMENT, (field,))
    assert double.orders == []


async def test_what_is_offered(client: Client) -> None:
    profile = await client.profile()
    assert list(profile.drain_rules) == [
        pb.DRAIN_RULE_WAIT,
        pb.DRAIN_RULE_ABORT,
        pb.DRAIN_RULE_REFUSE,
    ]
    assert [row.kind for row in profile.resources] == [WEIGHTS, KV, 3]


@pytest.mark.parametrize(
    ("modes", "rules"),
    [({PauseMode.ABORT}, [pb.DRAIN_RULE_ABORT]), ({PauseMode.KEEP}, [])],
)
async def test_drains_are_as_good_as_the_pauses(
    modes: set[PauseMode], rules: list[int], tmp_path: Path
) -> None:
    def make() -> MinimalEngine:
        engine = FullEngine()
        engine.offered = Capabilities(
            operations=frozenset({OperationKind.PAUSE, OperationKind.RELEASE_RESOURCES}),
            pause_modes=frozenset(modes),
            resources={ResourceKind.KV_CACHE: frozenset(ContentPolicy)},
        )
        return engine

    async with running_engine(tmp_path, make_engine=make) as double, client_of(double) as client:
        assert list((await client.profile()).drain_rules) == rules


async def test_without_pauses_there_is_no_release(tmp_path: Path) -> None:
    def make() -> MinimalEngine:
        engine = FullEngine()
        engine.offered = Capabilities(
            operations=frozenset(OperationKind) - {OperationKind.PAUSE},
            resources={ResourceKind.KV_CACHE: frozenset(ContentPolicy)},
        )
        return engine

    async with running_engine(tmp_path, make_engine=make) as double, client_of(double) as client:
        offered = {row.kind for row in (await client.profile()).operations}
        assert not offered & {4, 5, 6, 8}
        seen = await refused(client.stream(client.release("kv_cache")))
        assert seen.code is Code.UNIMPLEMENTED


async def test_an_engine_that_closes_by_itself_releases_without_pauses(tmp_path: Path) -> None:
    """It says so by a drain rule, and waits for what runs; nobody can order it to end that."""

    def make() -> MinimalEngine:
        engine = FullEngine()
        engine.offered = Capabilities(
            operations=frozenset(OperationKind) - {OperationKind.PAUSE},
            resources={ResourceKind.KV_CACHE: frozenset(ContentPolicy)},
            drain_rules=frozenset(DrainRule),
        )
        return engine

    async with running_engine(tmp_path, make_engine=make) as double, client_of(double) as client:
        profile = await client.profile()
        assert {4, 5} <= {row.kind for row in profile.operations}
        assert not {6, 8} & {row.kind for row in profile.operations}
        assert list(profile.drain_rules) == [pb.DRAIN_RULE_WAIT]
        assert not profile.pause_modes
        refusal = await refused(client.stream(client.release("kv_cache", drain="abort")))
        assert refusal.code is Code.UNIMPLEMENTED
        await client.completed(client.release("kv_cache"))
        assert await client.admission() == "paused"
