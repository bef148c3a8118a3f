"""Two phases over several ranks: what each of them reports, and what failures leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from app.domain.kinds import PauseMode
from app.domain.operation import Progress
from app.enginekit.runtime import Order
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import Client, Event, assert_whole, client_of, refused, until
from tests.enginekit.minimal_engine import Hook, explode, fault, hang, hang_deaf
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(ranks3: EngineDouble) -> AsyncIterator[Client]:
    async with client_of(ranks3) as connected:
        yield connected


@pytest.fixture
def double(ranks3: EngineDouble) -> EngineDouble:
    return ranks3


def reports(events: list[Event]) -> list[tuple[int, str]]:
    return [
        (event.rank.rank, pb.RankState.Name(event.rank.state).removeprefix("RANK_STATE_").lower())
        for event in events
        if event.HasField("rank")
    ]


async def test_all_ranks_prepare_before_any_commits(client: Client, double: EngineDouble) -> None:
    events = await client.order(client.pause())
    assert_whole(events)
    assert sorted(reports(events)[:3]) == [(0, "prepared"), (1, "prepared"), (2, "prepared")]
    assert sorted(reports(events)[3:]) == [(0, "committed"), (1, "committed"), (2, "committed")]
    phases = [call.phase for call in double.calls]
    assert phases == ["prepare"] * 3 + ["commit"] * 3 + ["conclude"]
    assert (await client.profile()).world_size == 3


async def test_one_slow_rank_keeps_the_others_from_committing(
    client: Client, double: EngineDouble
) -> None:
    let_go = asyncio.Event()
    double.engine.script("prepare", until_set(let_go), 1)
    pausing = await client.begin(client.pause())
    await until(lambda: len(double.calls) == 3)
    assert {call.phase for call in double.calls} == {"prepare"}
    let_go.set()
    assert (await pausing.end()).HasField("completed")


@pytest.mark.parametrize(
    ("hook", "reason", "message"),
    [
        (fault, "RANK_BROKEN", "rank 1 cannot"),
        (explode, "INTERNAL", "the engine failed unexpectedly; its log says more"),
    ],
    ids=["fault", "unexpected"],
)
@pytest.mark.parametrize("phase", ["prepare", "commit", "conclude"])
async def test_a_failing_rank_undoes_the_order_everywhere(
    phase: str, hook: Hook, reason: str, message: str, client: Client, double: EngineDouble
) -> None:
    before = await client.profile()
    double.engine.script(phase, hook, -1 if phase == "conclude" else 1)
    events = await client.order(client.pause("keep"))
    assert_whole(events)
    failed = events[-1].failed
    assert (failed.reason, failed.retryable) == (reason, False)
    if phase != "conclude":
        assert failed.message == message
        assert list(failed.ranks) == [1]
        assert (1, "failed") in reports(events)
    assert failed.code == grpc.StatusCode.INTERNAL.value[0]
    effect = pb.FAILURE_EFFECT_NONE if phase == "prepare" else pb.FAILURE_EFFECT_ROLLED_BACK
    assert failed.effect == effect
    assert reports(events)[-3:] == [(0, "rolled_back"), (1, "rolled_back"), (2, "rolled_back")]
    assert "secret" not in str(events)
    # Nothing has changed, and the engine serves and takes orders.
    after = await client.profile()
    assert (after.revision, after.pause_epoch) == (before.revision, before.pause_epoch)
    assert after.state.admission == pb.ADMISSION_STATE_OPEN
    assert double.engine.paused is None
    assert await client.generate().finish_reason() == "LENGTH"
    double.engine.scripts.clear()
    assert (await client.completed(client.pause("keep"))).changed


async def test_a_rank_that_fails_to_prepare_stops_those_that_still_do(
    client: Client, double: EngineDouble
) -> None:
    double.engine.script("prepare", hang, 0, 2)
    double.engine.script("prepare", fault, 1)
    failed = await client.failed(client.pause())
    assert list(failed.ranks) == [1]


async def test_several_failing_ranks_are_all_named(client: Client, double: EngineDouble) -> None:
    double.engine.script("commit", fault, 0, 2)
    failed = await client.failed(client.pause())
    assert list(failed.ranks) == [0, 2]
    assert failed.message == "rank 0 cannot"


async def test_an_abort_pause_that_fails_warns_of_what_cannot_be_undone(
    client: Client, double: EngineDouble
) -> None:
    double.engine.script("commit", fault, 2)
    events = await client.order(client.pause("abort"))
    (warning,) = [event.warning for event in events if event.HasField("warning")]
    assert warning.reason == "REQUESTS_MAY_HAVE_ENDED"
    operation = await client.operation(operation_id=events[0].operation_id)
    assert [told.reason for told in operation.warnings] == ["REQUESTS_MAY_HAVE_ENDED"]


@pytest.mark.parametrize("hook", [fault, explode, hang, hang_deaf])
async def test_ranks_that_cannot_be_rolled_back_take_the_engine_out_of_service(
    hook: Hook, client: Client, double: EngineDouble
) -> None:
    before = await client.profile()
    double.engine.script("commit", fault, 1)
    double.engine.script("rollback", hook, 2)
    events = await client.order(client.pause("keep"))
    assert_whole(events)
    failed = events[-1].failed
    assert list(failed.ranks) == [1, 2]
    assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
    assert failed.revision == before.revision + 1
    state = (await client.profile()).state
    assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
    assert state.admission == pb.ADMISSION_STATE_OPEN
    assert [report.rank for report in state.ranks] == [2]
    assert (await client.generate().refused()).reason == "OUT_OF_SERVICE"
    assert await client.health("openengine.v1.Inference") == "NOT_SERVING"
    # A pause can still be ordered, but not lifted.
    double.engine.scripts.clear()
    paused = await client.completed(client.pause())
    seen = await refused(client.stream(client.resume(paused.pause.pause_epoch)))
    assert seen.reason == "WEIGHTS_NOT_VALID"


async def test_a_rank_that_is_lost_in_the_preparation_has_applied_nothing(
    client: Client, double: EngineDouble
) -> None:
    double.engine.script("prepare", fault, 1)
    double.engine.script("rollback", fault, 1)
    events = await client.order(client.pause("keep"))
    assert_whole(events)
    failed = events[-1].failed
    assert (list(failed.ranks), failed.effect) == ([1], pb.FAILURE_EFFECT_NONE)
    # It is not known to be as before, all the same.
    assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
    assert (await client.generate().refused()).reason == "OUT_OF_SERVICE"


async def test_ranks_started_anew_have_nothing_of_what_could_not_be_undone(
    client: Client, double: EngineDouble
) -> None:
    """Told once, however many look at the same time."""
    double.engine.script("commit", fault, 1)
    double.engine.script("rollback", fault, 2)
    await client.failed(client.pause("keep"))
    double.engine.scripts.clear()
    before = await client.profile()
    assert before.state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
    double.engine.observation = replace(double.engine.observation, group=1)
    for after in await asyncio.gather(*(client.profile() for _ in range(4))):
        assert after.revision == before.revision + 1
        assert after.state.weights.state == pb.WEIGHTS_STATE_VALID
        assert not after.state.ranks
    assert await client.generate().finish_reason() == "LENGTH"


async def test_requests_held_meanwhile_are_not_let_into_an_engine_out_of_service(
    client: Client, double: EngineDouble
) -> None:
    let_go = asyncio.Event()

    async def fail_late(order: Order, rank: int) -> None:
        await let_go.wait()
        await fault(order, rank)

    double.engine.script("commit", fail_late, 1)
    double.engine.script("rollback", fault, 2)
    pausing = await client.begin(client.pause("abort"))
    await until(lambda: any(call.phase == "commit" for call in double.calls))
    waiting = client.generate()

    async def held() -> bool:
        return (await client.load()).queued_requests == 1

    await until(held)
    let_go.set()
    assert (await pausing.end()).HasField("failed")
    assert "out of service" in (await waiting.end()).error.message
    assert double.engine.started == []


async def test_a_failed_change_of_mode_leaves_the_earlier_pause(
    client: Client, double: EngineDouble
) -> None:
    first = await client.completed(client.pause("keep"))
    double.engine.script("commit", fault, 1)
    await client.failed(client.pause("abort"))
    after = await client.profile()
    assert after.state.admission == pb.ADMISSION_STATE_PAUSED
    assert after.state.pause.mode == pb.PAUSE_MODE_KEEP
    assert after.pause_epoch == first.pause.pause_epoch
    assert double.engine.paused is PauseMode.KEEP


async def test_a_failed_resume_leaves_the_pause(client: Client, double: EngineDouble) -> None:
    paused = await client.completed(client.pause())
    held = client.generate()
    await client.held(1)
    double.engine.script("prepare", fault, 0)
    await client.failed(client.resume(paused.pause.pause_epoch))
    assert await client.admission() == "paused"
    assert not held.done
    double.engine.scripts.clear()
    await client.completed(client.resume(paused.pause.pause_epoch))
    assert await held.finish_reason() == "LENGTH"


async def test_progress_of_a_runtime_is_reported_without_flooding(
    client: Client, double: EngineDouble
) -> None:
    double.engine.progress = tuple(
        Progress("scanning", done, 5000, "blocks") for done in range(5000)
    )
    events = await client.order(client.flush())
    assert_whole(events)
    told = [event.progress for event in events if event.HasField("progress")]
    assert told
    assert {progress.phase for progress in told} == {"scanning"}
    assert len(told) < 500
    assert [progress.done for progress in told] == sorted(progress.done for progress in told)
