"""What pauses do to requests, and to each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from app.domain.kinds import PauseMode
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import error_pb2, lifecycle_pb2
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, assert_whole, client_of, refused, shape, until

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
Error = error_pb2.ErrorCode


async def test_a_drain_lets_running_requests_finish_and_holds_new_ones(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    running = [client.generate("one two three") for _ in range(3)]
    for request in running:
        await request.first()
    before = await client.profile()
    draining = await client.begin(client.pause())
    progress = (await draining.next() or pytest.fail("no progress")).progress
    assert (progress.phase, progress.done, progress.total, progress.unit) == (
        "draining",
        0,
        3,
        "requests",
    )
    held = client.generate("held")
    await client.held(1)
    profile = await client.profile()
    assert profile.state.admission == pb.ADMISSION_STATE_DRAINING
    assert profile.state.pause.mode == pb.PAUSE_MODE_DRAIN
    assert profile.state.pause.epoch == 0  # not in effect yet
    assert profile.pause_epoch == before.pause_epoch
    assert profile.revision == before.revision + 1
    double.engine.go()
    assert [await request.finish_reason() for request in running] == ["LENGTH"] * 3
    assert {request.text for request in running} == {"one two three "}
    events = await draining.rest()
    assert_whole(events)
    progresses = [event.progress for event in events if event.HasField("progress")]
    assert progresses[-1].done == progresses[-1].total == 3
    result = events[-1].completed.pause
    assert (result.pause_epoch, result.requests_finished) == (before.pause_epoch + 1, 3)
    assert not held.done
    profile = await client.profile()
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    assert profile.state.pause.operation_id == events[0].operation_id
    assert profile.state.pause.requests_held == 1

    resumed = await client.completed(client.resume(result.pause_epoch))
    assert (resumed.resume.pause_epoch, resumed.resume.requests_admitted) == (
        result.pause_epoch,
        1,
    )
    assert await held.finish_reason() == "LENGTH"
    assert await client.admission() == "open"
    assert not (await client.profile()).state.HasField("pause")


async def test_held_requests_are_let_in_in_the_order_in_which_they_came(
    client: Client, double: EngineDouble
) -> None:
    paused = await client.completed(client.pause())
    waiting = []
    for number in range(10):
        waiting.append(client.generate(f"a b{number}", request_id=f"r{number}"))
        await client.held(number + 1)
    await client.completed(client.resume(paused.pause.pause_epoch))
    for request in waiting:
        await request.end()
    assert double.engine.started == [f"r{number}" for number in range(10)]


async def test_refuse_turns_new_requests_away_at_once(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    draining = await client.begin(client.pause(new_requests="refuse"))
    await draining.next()
    seen = await client.generate().refused()
    assert (seen.code, seen.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert seen.metadata["retryable"] == "true"
    double.engine.go()
    assert (await draining.end()).HasField("completed")
    assert (await client.generate().refused()).reason == "DRAINING"
    assert await running.finish_reason() == "LENGTH"


async def test_a_request_is_held_no_longer_than_the_pause_says(client: Client) -> None:
    await client.completed(client.pause(hold_limit_ms=50))
    end = await client.generate().end()
    assert (end.error.code, end.error.retryable) == (Error.ERROR_CODE_DRAINING, True)
    assert (await client.profile()).state.pause.hold_limit_ms == 50


async def test_no_more_requests_are_held_than_the_engine_says(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, max_held_requests=2) as double,
        client_of(double) as client,
    ):
        paused = await client.completed(client.pause())
        held = [client.generate(), client.generate()]
        await client.held(2)
        seen = await client.generate().refused()
        assert (seen.code, seen.reason) == (Code.RESOURCE_EXHAUSTED, "OVERLOADED")
        await client.completed(client.resume(paused.pause.pause_epoch))
        assert [await request.finish_reason() for request in held] == ["LENGTH"] * 2


async def test_a_held_request_whose_client_leaves_is_forgotten(
    client: Client, double: EngineDouble
) -> None:
    paused = await client.completed(client.pause())
    gone, stays = client.generate(request_id="gone"), client.generate()
    await client.held(2)
    assert (await client.load()).queued_requests == 2
    gone.hang_up()
    await client.held(1)
    again = client.generate(request_id="gone")  # the id is free again
    await client.held(2)
    resumed = await client.completed(client.resume(paused.pause.pause_epoch))
    assert resumed.resume.requests_admitted == 2
    assert [await request.finish_reason() for request in (stays, again)] == ["LENGTH"] * 2


async def test_abort_ends_what_runs(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = [client.generate() for _ in range(2)]
    for request in running:
        await request.first()
    paused = await client.completed(client.pause("abort"))
    assert paused.pause.requests_aborted == 2
    for request in running:
        end = await request.end()
        assert await request.finish_reason() == "CANCELLED"
        assert end.finished.message == "ended by a pause"


async def test_keep_freezes_and_resume_continues(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = client.generate("one two three")
    await running.first()
    paused = await client.completed(client.pause("keep"))
    assert paused.pause.requests_kept == 1
    double.engine.go()
    held = client.generate()
    await client.held(1)
    state = (await client.profile()).state
    assert state.pause.requests_kept == 1
    assert running.text == "one "
    resumed = await client.completed(client.resume(paused.pause.pause_epoch))
    assert (resumed.resume.requests_continued, resumed.resume.requests_admitted) == (1, 1)
    assert await running.finish_reason() == "LENGTH"
    assert running.text == "one two three "
    assert await held.finish_reason() == "LENGTH"


async def test_the_same_pause_again_changes_nothing(client: Client, double: EngineDouble) -> None:
    first = await client.completed(client.pause(hold_limit_ms=9000))
    again = await client.completed(client.pause(hold_limit_ms=9000))
    assert first.changed
    assert not again.changed
    assert again.pause.pause_epoch == first.pause.pause_epoch
    assert again.revision == first.revision
    assert len(double.orders) == 1


async def test_the_same_mode_with_another_rule_is_a_new_pause_that_ranks_do_not_see(
    client: Client, double: EngineDouble
) -> None:
    first = await client.completed(client.pause())
    held = client.generate()
    await client.held(1)
    again = await client.completed(client.pause(new_requests="refuse"))
    assert again.changed
    assert again.pause.pause_epoch == first.pause.pause_epoch + 1
    assert len(double.orders) == 1
    end = await held.end()
    assert (end.error.code, end.error.retryable) == (Error.ERROR_CODE_DRAINING, True)
    assert (await client.generate().refused()).reason == "DRAINING"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("keep", "abort"),
        ("drain", "keep"),
        ("abort", "keep"),
        ("drain", "abort"),
        ("keep", "drain"),
    ],
)
async def test_another_mode_is_a_new_pause(
    before: str, after: str, client: Client, double: EngineDouble
) -> None:
    first = await client.completed(client.pause(before))
    second = await client.completed(client.pause(after))
    assert second.changed
    assert second.pause.pause_epoch == first.pause.pause_epoch + 1
    assert second.revision == first.revision + 1
    assert double.engine.paused is PauseMode(after)
    stale = await refused(client.stream(client.resume(first.pause.pause_epoch)))
    assert (stale.code, stale.reason) == (Code.FAILED_PRECONDITION, "STALE_PAUSE_EPOCH")
    assert (await client.completed(client.resume(second.pause.pause_epoch))).changed


async def test_frozen_requests_cannot_be_drained_but_can_be_ended(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    await client.completed(client.pause("keep"))
    seen = await refused(client.stream(client.pause("drain")))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "REQUESTS_FROZEN")
    ended = await client.completed(client.pause("abort"))
    assert ended.pause.requests_aborted == 1
    assert await running.finish_reason() == "CANCELLED"


async def test_resume_names_the_pause_it_lifts(client: Client, double: EngineDouble) -> None:
    epoch = (await client.profile()).pause_epoch
    seen = await refused(client.stream(client.resume(epoch)))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "NOT_PAUSED")
    paused = await client.completed(client.pause())
    for wrong in (epoch, paused.pause.pause_epoch + 1):
        seen = await refused(client.stream(client.resume(wrong)))
        assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "STALE_PAUSE_EPOCH")
        assert seen.metadata["current_pause_epoch"] == str(paused.pause.pause_epoch)
    resume = client.resume(paused.pause.pause_epoch)
    await client.completed(resume)
    # Lifted once: another pause is not lifted by the same order.
    again = await client.completed(client.pause())
    assert (await client.order(resume))[-1].completed.changed
    assert await client.admission() == "paused"
    assert again.pause.pause_epoch == paused.pause.pause_epoch + 1


async def test_resume_does_not_break_a_drain(client: Client, double: EngineDouble) -> None:
    first = await client.completed(client.pause())
    await client.completed(client.resume(first.pause.pause_epoch))
    double.engine.stall()
    running = client.generate()
    await running.first()
    draining = await client.begin(client.pause())
    await draining.next()
    seen = await refused(client.stream(client.resume(first.pause.pause_epoch)))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "DRAIN_RUNNING")
    stale = await refused(client.stream(client.resume(99)))
    assert stale.reason == "STALE_PAUSE_EPOCH"
    # The way out that is left: abort its requests.
    await client.control.Abort(
        lifecycle_pb2.AbortRequest(request_id=running.request_id), timeout=10
    )
    end = await draining.end()
    assert end.completed.pause.requests_finished == 0
    assert await running.finish_reason() == "CANCELLED"


async def test_a_client_that_leaves_ends_its_part_of_the_drain(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    draining = await client.begin(client.pause())
    running.hang_up()
    assert (await draining.end()).completed.changed
    await until(lambda: double.engine.running == 0)


async def test_requests_during_an_abort_pause_wait_for_its_outcome(
    client: Client, double: EngineDouble
) -> None:
    """Between prepare and commit nobody may slip in behind the ranks."""
    from tests.enginekit.minimal_engine import until as until_set

    let_go = asyncio.Event()
    double.engine.script("commit", until_set(let_go))
    pausing = await client.begin(client.pause("abort", new_requests="refuse"))
    await until(lambda: any(call.phase == "commit" for call in double.calls))
    late = client.generate()

    async def held() -> bool:
        return (await client.load()).queued_requests == 1

    await until(held)
    assert await client.admission() == "open"  # not paused until it is committed
    let_go.set()
    assert shape(await pausing.rest())[-1] == "completed"
    assert (await late.end()).error.code == Error.ERROR_CODE_DRAINING
