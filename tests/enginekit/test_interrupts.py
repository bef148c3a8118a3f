"""Cancellation and deadlines: what they stop, and that nothing hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from app.domain.capabilities import Capabilities
from app.domain.kinds import CacheKind, OperationKind
from app.enginekit.runtime import Order, RuntimeFault
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, assert_whole, client_of, refused, shape, until
from tests.enginekit.minimal_engine import Hook, MinimalEngine, hang, hang_deaf
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


def cancel_of(client: Client, operation_id: str) -> object:
    return client.admin.CancelOperation(
        pb.CancelAdminOperationRequest(operation_id=operation_id), timeout=10
    )


async def test_a_cancelled_drain_opens_admission_again(
    client: Client, double: EngineDouble
) -> None:
    before = await client.profile()
    double.engine.stall()
    running = client.generate()
    await running.first()
    draining = await client.begin(client.pause())
    await draining.next()
    held = client.generate("held")
    await client.held(1)
    asked = await client.cancel(draining.events[0].operation_id)
    assert asked.state in (
        pb.ADMIN_OPERATION_STATE_CANCELLING,
        pb.ADMIN_OPERATION_STATE_CANCELLED,
    )
    events = await draining.rest()
    assert_whole(events)
    assert events[-1].HasField("cancelled")
    assert "cancelling" in [e.progress.phase for e in events if e.HasField("progress")]
    assert await held.finish_reason() == "LENGTH"
    after = await client.profile()
    assert after.state.admission == pb.ADMISSION_STATE_OPEN
    assert not after.state.HasField("pause")
    assert after.pause_epoch == before.pause_epoch
    # Open, draining, open: two changes.
    assert after.revision == before.revision + 2 == events[-1].cancelled.revision
    assert double.orders == []
    ended = await client.operation(operation_id=events[0].operation_id)
    assert ended.state == pb.ADMIN_OPERATION_STATE_CANCELLED
    assert ended.cancelled == events[-1].cancelled
    double.engine.go()
    assert await running.finish_reason() == "LENGTH"


async def test_cancelling_again_is_the_same_cancellation(
    client: Client, double: EngineDouble
) -> None:
    double.engine.script("prepare", hang_deaf)
    pausing = await client.begin(client.pause())
    operation_id = pausing.events[0].operation_id
    await until(lambda: double.calls)
    first = await client.cancel(operation_id)
    second = await client.cancel(operation_id)
    assert first.state == second.state == pb.ADMIN_OPERATION_STATE_CANCELLING
    assert first.last_sequence == second.last_sequence


async def test_a_cancelled_prepare_is_rolled_back(client: Client, double: EngineDouble) -> None:
    double.engine.script("prepare", hang)
    pausing = await client.begin(client.pause("abort"))
    await until(lambda: double.calls)
    await client.cancel(pausing.events[0].operation_id)
    assert (await pausing.end()).HasField("cancelled")
    assert [call.phase for call in double.calls] == ["prepare", "rollback"]
    assert await client.admission() == "open"


async def test_what_already_commits_is_not_cancelled_any_more(
    client: Client, double: EngineDouble
) -> None:
    let_go = asyncio.Event()
    double.engine.script("commit", until_set(let_go))
    pausing = await client.begin(client.pause())
    await until(lambda: any(call.phase == "commit" for call in double.calls))
    await client.cancel(pausing.events[0].operation_id)
    let_go.set()
    events = await pausing.rest()
    assert_whole(events)
    assert events[-1].completed.changed
    assert await client.admission() == "paused"


async def test_what_cannot_be_cancelled(client: Client, double: EngineDouble) -> None:
    seen = await refused(cancel_of(client, "none"))
    assert (seen.code, seen.reason) == (Code.NOT_FOUND, "OPERATION_NOT_FOUND")
    seen = await refused(cancel_of(client, ""))
    assert (seen.code, seen.fields) == (Code.INVALID_ARGUMENT, ("operation_id",))
    events = await client.order(client.pause())
    seen = await refused(cancel_of(client, events[0].operation_id))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "OPERATION_ENDED")
    let_go = asyncio.Event()
    double.engine.script("prepare", until_set(let_go))
    flushing = await client.begin(client.flush())
    seen = await refused(cancel_of(client, flushing.events[0].operation_id))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "NOT_CANCELLABLE")
    let_go.set()
    assert (await flushing.end()).HasField("completed")
    supported = {row.kind: row.cancellable for row in (await client.profile()).operations}
    assert [kind for kind, can in supported.items() if can] == [pb.ADMIN_OPERATION_KIND_PAUSE]


async def test_an_engine_may_let_other_orders_be_cancelled(tmp_path: Path) -> None:
    def make() -> MinimalEngine:
        engine = MinimalEngine()
        flush = frozenset({OperationKind.FLUSH_CACHES})
        engine.offered = Capabilities(
            operations=flush, cancellable=flush, cache_kinds=frozenset({CacheKind.PREFIX})
        )
        return engine

    async with running_engine(tmp_path, make_engine=make) as double, client_of(double) as client:
        double.engine.script("prepare", hang)
        flushing = await client.begin(client.flush())
        await until(lambda: double.calls)
        await client.cancel(flushing.events[0].operation_id)
        assert (await flushing.end()).HasField("cancelled")


async def test_a_drain_that_takes_too_long_fails_and_opens_admission(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    events = await client.order(client.pause(deadline_ms=200))
    assert_whole(events)
    failed = events[-1].failed
    assert (failed.code, failed.reason) == (
        Code.DEADLINE_EXCEEDED.value[0],
        "DEADLINE_EXCEEDED",
    )
    assert failed.effect == pb.FAILURE_EFFECT_NONE
    assert await client.admission() == "open"
    double.engine.go()
    assert await running.finish_reason() == "LENGTH"


@pytest.mark.parametrize(
    ("phase", "hook"),
    [
        ("prepare", hang),
        ("prepare", hang_deaf),
        ("commit", hang),
        ("conclude", hang),
        ("conclude", hang_deaf),
    ],
)
async def test_ranks_that_hang_are_left_at_the_deadline(
    phase: str, hook: Hook, ranks3: EngineDouble
) -> None:
    async with client_of(ranks3) as client:
        ranks3.engine.script(phase, hook, -1 if phase == "conclude" else 1)
        events = await client.order(client.pause(deadline_ms=1000))
        assert_whole(events)
        failed = events[-1].failed
        assert failed.reason == "DEADLINE_EXCEEDED"
        if phase != "conclude":
            assert list(failed.ranks) == [1]
        assert failed.effect == (
            pb.FAILURE_EFFECT_NONE if phase == "prepare" else pb.FAILURE_EFFECT_ROLLED_BACK
        )
        assert await client.admission() == "open"
        assert await client.generate().finish_reason() == "LENGTH"


async def test_a_commit_that_does_not_let_go_may_still_take_effect(ranks3: EngineDouble) -> None:
    """Its rollback proves nothing then, so the engine must not serve."""
    async with client_of(ranks3) as client:
        ranks3.engine.script("commit", hang_deaf, 1)
        failed = await client.failed(client.pause(deadline_ms=150))
        assert (failed.reason, list(failed.ranks)) == ("ROLLBACK_FAILED", [1])
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        assert (await client.generate().refused()).reason == "OUT_OF_SERVICE"


async def test_a_runtime_that_does_not_answer_delays_no_order_for_ever(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, runtime_timeout_s=0.1) as double,
        client_of(double) as client,
    ):

        async def never() -> None:
            await asyncio.Event().wait()

        double.engine.observing = never
        profile = await client.profile()
        assert profile.state.weights.state == pb.WEIGHTS_STATE_UNKNOWN
        assert await client.health("openengine.v1.Inference") == "NOT_SERVING"
        assert shape(await client.order(client.pause()))[-1] == "completed"
        double.engine.observing = None
        profile = await client.profile()
        assert profile.state.weights.state == pb.WEIGHTS_STATE_VALID


async def test_a_runtime_is_told_when_it_will_be_interrupted(
    client: Client, double: EngineDouble
) -> None:
    """So that it can give up by itself, and say what it waited for."""

    async def give_up(order: Order, _rank: int) -> None:
        left_s = order.deadline_at - asyncio.get_running_loop().time()
        assert 0 < left_s <= 60
        raise RuntimeFault("TRANSFER_FAILED", "the trainer did not come", retryable=True)

    double.engine.script("prepare", give_up)
    failed = await client.failed(client.pause(deadline_ms=60_000))
    assert (failed.reason, failed.message) == ("TRANSFER_FAILED", "the trainer did not come")
