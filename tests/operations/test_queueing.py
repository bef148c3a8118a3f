"""Orders that wait behind a running one: in which order they go, and by what they are judged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.domain.commands import AbortRequests, Command, Resume
from app.domain.errors import (
    DrainRunning,
    EngineBusy,
    EngineHasOpenOperation,
    NotPaused,
    QueueFull,
    RevisionMismatch,
    StalePauseEpoch,
    UnsupportedOperation,
)
from app.domain.facts import EngineFacts
from app.domain.kinds import FailureEffect, OperationKind, OperationState
from app.domain.operation import Operation
from tests.doubles.engine import EngineDouble
from tests.enginekit.minimal_engine import until as released_by
from tests.operations.gateway import ALICE, CALLER, DRAIN, FLUSH, Gateway, request, until

pytestmark = pytest.mark.anyio

_S = OperationState
_ORDERS = {"Pause", "Resume", "FlushCaches"}


def sent(engine: EngineDouble) -> list[str]:
    """Operations whose orders have arrived, in the order of arrival."""
    return [key for method, key in engine.received if method in _ORDERS]


@pytest.fixture
def go(engine: EngineDouble) -> asyncio.Event:
    """Orders stay under way at the engine until it is set."""
    event = asyncio.Event()
    engine.engine.script("prepare", released_by(event))
    return event


async def wait_for(gateway: Gateway, command: Command = FLUSH, **more: Any) -> Operation:
    return await gateway.give(command, when_busy="queue", **more)


async def facts_of(gateway: Gateway) -> EngineFacts:
    facts = (await gateway.fleet.reread("e1", 5.0)).observed.facts
    assert facts is not None
    return facts


async def place_of(gateway: Gateway, operation: Operation) -> int | None:
    known = await gateway.ledger.operations.get(operation.id)
    assert known is not None
    return known.queue_position


class TestOrder:
    async def test_first_come_first_sent(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        drain = await gateway.give(DRAIN)
        waiting = [await wait_for(gateway, command) for command in (FLUSH, DRAIN, FLUSH)]
        assert [each.state for each in waiting] == [_S.QUEUED] * 3
        assert [each.queue_position for each in waiting] == [1, 2, 3]
        await until(lambda: sent(engine) == [drain.id])
        go.set()
        for operation in (drain, *waiting):
            ended = await gateway.end_of(operation)
            assert (ended.state, ended.queue_position) == (_S.SUCCEEDED, None)
        assert sent(engine) == [drain.id, *(each.id for each in waiting)]
        events = await gateway.events_of(waiting[2].id)
        assert [event.type for event in events][:3] == ["accepted", "queued", "dispatched"]
        assert events[1].data == {"queue_position": 3}

    async def test_a_free_engine_takes_it_at_once(self, gateway: Gateway) -> None:
        operation = await wait_for(gateway)
        assert operation.state is _S.ACCEPTED
        assert "queued" not in await gateway.types_of((await gateway.end_of(operation)).id)

    async def test_those_given_at_once_go_one_by_one(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        given = await asyncio.gather(*(wait_for(gateway) for _ in range(8)))
        places = sorted(each.queue_position or 0 for each in given)
        assert places == list(range(8))
        in_line = sorted(given, key=lambda each: each.queue_position or 0)
        go.set()
        for operation in given:
            assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert sent(engine) == [each.id for each in in_line]

    async def test_who_does_not_wait_does_not_overtake(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        """The slot is free, and the first of those that wait cannot have it yet."""
        first = await gateway.give(FLUSH)
        waiting = await wait_for(gateway)
        await until(lambda: sent(engine))
        engine.delays_s["GetAdminProfile"] = 60.0  # it can't be judged meanwhile
        go.set()
        await gateway.end_of(first)
        with pytest.raises(EngineBusy) as busy:
            await gateway.give(FLUSH)
        assert busy.value.operation_id == waiting.id
        behind = await wait_for(gateway)
        assert behind.queue_position == 2
        beside = await gateway.give(AbortRequests(all=True), when_busy="queue")
        assert beside.state is _S.ACCEPTED
        engine.delays_s.clear()
        for operation in (waiting, behind):
            assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert sent(engine) == [first.id, waiting.id, behind.id]

    async def test_what_is_cancelled_lets_the_others_move_up(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        first = await gateway.give(FLUSH)
        one, two = await wait_for(gateway), await wait_for(gateway)
        cancelled = await gateway.orders.cancel(one.id, CALLER)
        assert (cancelled.state, cancelled.queue_position) == (_S.CANCELLED, None)
        assert await place_of(gateway, two) == 1
        go.set()
        await gateway.end_of(two)
        assert sent(engine) == [first.id, two.id]
        assert await gateway.types_of(one.id) == ["accepted", "queued", "cancelled"]

    async def test_no_more_than_may_wait(self, gateway: Gateway, go: asyncio.Event) -> None:
        running = await gateway.give(FLUSH)
        waiting = [await wait_for(gateway) for _ in range(16)]
        with pytest.raises(QueueFull) as full:
            await wait_for(gateway, key="again")
        assert full.value.operation_id == running.id
        with pytest.raises(QueueFull):
            await gateway.orders.plan(request(FLUSH, key=None, when_busy="queue"))
        go.set()
        await gateway.end_of(waiting[0])
        # The refusal has left the key unused.
        assert (await gateway.end_of(await wait_for(gateway, key="again"))).state is _S.SUCCEEDED

    async def test_a_key_gives_the_operation_that_waits(
        self, gateway: Gateway, go: asyncio.Event
    ) -> None:
        await gateway.give(FLUSH)
        one = await wait_for(gateway, key="one")
        two = await wait_for(gateway, key="two")
        again = await gateway.orders.submit(request(FLUSH, key="two", when_busy="queue"))
        assert (again.fresh, again.operation) == (False, two)
        await gateway.orders.cancel(one.id, CALLER)
        replayed = await gateway.ledger.operations.replay(ALICE, "two", "f")
        assert replayed is not None
        assert replayed.queue_position == 1

    async def test_a_plan_tells_the_place(self, gateway: Gateway, go: asyncio.Event) -> None:
        wanted = request(FLUSH, key=None, when_busy="queue")
        free = await gateway.orders.plan(wanted)
        assert (free["would"], free["queue_position"]) == ("accept", None)
        running = await gateway.give(FLUSH)
        await wait_for(gateway)
        plan = await gateway.orders.plan(wanted)
        assert (plan["would"], plan["queue_position"]) == ("queue", 2)
        assert plan["running_operation"] == running.id
        beside = request(AbortRequests(all=True), key=None, when_busy="queue")
        assert (await gateway.orders.plan(beside))["would"] == "accept"

    async def test_its_engine_stays_registered(self, gateway: Gateway, go: asyncio.Event) -> None:
        running = await gateway.give(FLUSH)
        waiting = await wait_for(gateway)
        with pytest.raises(EngineHasOpenOperation):
            await gateway.fleet.remove("e1", 1, CALLER)
        go.set()
        await gateway.end_of(running)
        await gateway.end_of(waiting)
        await gateway.fleet.remove("e1", 1, CALLER)


class TestJudgedAtItsTurn:
    async def test_state_is_not_held_against_what_waits(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        """Neither is right now: what runs decides what is right then."""
        running = await gateway.give(FLUSH)
        facts = await facts_of(gateway)
        epoch = facts.pause_epoch
        with pytest.raises(StalePauseEpoch):
            await wait_for(gateway, Resume(pause_epoch=epoch + 1))
        with pytest.raises(RevisionMismatch):
            await wait_for(gateway, expected_revision=facts.revision + 1)
        go.set()
        await gateway.end_of(running)
        assert len(sent(engine)) == 1

    async def test_what_no_longer_holds_ends_as_it_would_be_refused(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        go.set()
        paused = await gateway.end_of(await gateway.give(DRAIN))
        assert paused.result is not None
        epoch = paused.result["pause_epoch"]
        assert isinstance(epoch, int)
        go.clear()
        running = await gateway.give(FLUSH)
        lift = await wait_for(gateway, Resume(pause_epoch=epoch))
        again = await wait_for(gateway, Resume(pause_epoch=epoch))
        last = await wait_for(gateway)
        go.set()
        assert (await gateway.end_of(lift)).state is _S.SUCCEEDED
        failed = await gateway.end_of(again)
        assert failed.error is not None
        assert (failed.state, failed.error.reason) == (_S.FAILED, NotPaused.reason)
        assert (failed.error.code, failed.error.effect) == (
            "FAILED_PRECONDITION",
            FailureEffect.NONE,
        )
        assert failed.started_at is None
        await gateway.end_of(last)
        assert sent(engine) == [paused.id, running.id, lift.id, last.id]

    async def test_a_state_that_those_before_it_bring_about(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        """Not paused when it is given, which is not held against it. Its epoch is that of a pause
        that was lifted before, and the drain makes another."""
        go.set()
        paused = await gateway.end_of(await gateway.give(DRAIN))
        assert paused.result is not None
        epoch = paused.result["pause_epoch"]
        assert isinstance(epoch, int)
        await gateway.end_of(await gateway.give(Resume(pause_epoch=epoch)))
        go.clear()
        drain = await gateway.give(DRAIN)
        with pytest.raises((NotPaused, DrainRunning)):
            await gateway.give(Resume(pause_epoch=epoch))
        waiting = await wait_for(gateway, Resume(pause_epoch=epoch))
        assert waiting.state is _S.QUEUED
        go.set()
        await gateway.end_of(drain)
        failed = await gateway.end_of(waiting)
        assert failed.error is not None
        assert failed.error.reason == StalePauseEpoch.reason

    async def test_a_revision_that_has_moved_on(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        drain = await gateway.give(DRAIN)
        revision = (await facts_of(gateway)).revision
        waiting = await wait_for(gateway, expected_revision=revision)
        go.set()
        await gateway.end_of(drain)
        failed = await gateway.end_of(waiting)
        assert failed.error is not None
        assert (failed.error.code, failed.error.reason) == ("ABORTED", RevisionMismatch.reason)
        assert sent(engine) == [drain.id]

    async def test_what_the_engine_no_longer_offers(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        drain = await gateway.give(DRAIN)
        waiting = await wait_for(gateway)
        await until(lambda: sent(engine) == [drain.id])
        offered = engine.engine.offered
        engine.engine.offered = replace(
            offered, operations=offered.operations - {OperationKind.FLUSH_CACHES}
        )
        go.set()
        failed = await gateway.end_of(waiting)
        assert failed.error is not None
        assert (failed.error.code, failed.error.reason) == (
            "UNIMPLEMENTED",
            UnsupportedOperation.reason,
        )
        assert sent(engine) == [drain.id]


class TestDeadlines:
    async def test_it_runs_from_acceptance(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        running = await gateway.give(FLUSH)
        soon = await wait_for(gateway, deadline_ms=30_000)
        late = await wait_for(gateway, deadline_ms=600_000)
        gateway.clock.go(31)
        failed = await gateway.end_of(soon)
        assert failed.error is not None
        assert (failed.state, failed.error.reason) == (_S.FAILED, "DEADLINE_EXCEEDED")
        assert await place_of(gateway, late) == 1
        go.set()
        assert (await gateway.end_of(late)).state is _S.SUCCEEDED
        assert sent(engine) == [running.id, late.id]

    async def test_also_while_no_gateway_is_there(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        running = await gateway.give(FLUSH)
        waiting = await wait_for(gateway, deadline_ms=30_000)
        await until(lambda: sent(engine) == [running.id])
        await gateway.stop()
        go.set()
        gateway.clock.go(31)
        await gateway.start()
        failed = await gateway.end_of(waiting)
        assert failed.error is not None
        assert failed.error.reason == "DEADLINE_EXCEEDED"
        assert (await gateway.end_of(running)).state is _S.SUCCEEDED
        assert sent(engine).count(waiting.id) == 0

    async def test_an_outcome_that_is_not_known_keeps_the_others_waiting(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        drain = await gateway.give(DRAIN)
        soon = await wait_for(gateway, deadline_ms=30_000)
        late = await wait_for(gateway, deadline_ms=600_000)
        await until(lambda: sent(engine) == [drain.id])
        await engine.kill()
        await gateway.until(drain, _S.RECONCILING)
        gateway.clock.go(31)
        failed = await gateway.end_of(soon)
        assert failed.error is not None
        assert failed.error.reason == "DEADLINE_EXCEEDED"
        assert await gateway.state_of(late) is _S.QUEUED
        go.set()
        await engine.start()
        lost = await gateway.end_of(drain)
        assert lost.error is not None
        assert lost.error.reason == "ENGINE_RESTARTED"
        assert (await gateway.end_of(late)).state is _S.SUCCEEDED
        assert sent(engine)[-1] == late.id


class TestLives:
    async def test_a_later_life_goes_on_with_the_line(
        self, gateway: Gateway, engine: EngineDouble, go: asyncio.Event
    ) -> None:
        drain = await gateway.give(DRAIN)
        waiting = [await wait_for(gateway) for _ in range(3)]
        await until(lambda: sent(engine) == [drain.id])
        await gateway.restart()
        go.set()
        for operation in (drain, *waiting):
            assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        arrived = list(dict.fromkeys(sent(engine)))
        assert arrived == [drain.id, *(each.id for each in waiting)]
