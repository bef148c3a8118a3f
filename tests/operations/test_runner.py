"""From dispatch to the end, whatever happens to the engine, the connection or this process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from shutil import rmtree

import pytest

from app.domain.commands import AbortRequests, Command
from app.domain.kinds import FailureEffect, OperationState, Verification
from app.domain.operation import Operation
from app.operations.registering import EngineChange
from tests.doubles.engine import EngineDouble, Fault, running_engine
from tests.enginekit.minimal_engine import hang
from tests.enginekit.minimal_engine import until as released_by
from tests.operations.gateway import CALLER, DRAIN, FLUSH, Gateway, running_gateway, until

pytestmark = pytest.mark.anyio

_S = OperationState


def sent(engine: EngineDouble, operation: Operation) -> int:
    """How often the order has arrived under its key, in all lives of the engine."""
    return sum(
        1
        for method, key in engine.received
        if key == operation.id and method in ("Pause", "Resume", "FlushCaches")
    )


class TestLostReplies:
    @pytest.mark.parametrize(
        "fault", [Fault.DROP_AFTER_ACCEPTANCE, Fault.LOSE_REPLY], ids=lambda fault: fault.value
    )
    async def test_what_was_taken_on_is_asked_for_and_heard_to_its_end(
        self, gateway: Gateway, engine: EngineDouble, fault: Fault
    ) -> None:
        engine.fail_next("Pause", fault)
        operation = await gateway.end_of(await gateway.give(DRAIN))
        assert operation.state is _S.SUCCEEDED
        assert len(engine.orders) == 1
        types = await gateway.types_of(operation.id)
        assert "reconciling" in types
        assert engine.rpcs["GetOperation"] >= 1

    async def test_what_never_arrived_is_sent_again_under_the_same_key(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.fail_next("Pause", Fault.REFUSE_CONNECTION)
        operation = await gateway.end_of(await gateway.give(DRAIN))
        assert operation.state is _S.SUCCEEDED
        assert sent(engine, operation) == 2
        assert len(engine.orders) == 1
        events = await gateway.events_of(operation.id)
        again = [event for event in events if event.type == "dispatched"]
        assert [event.data for event in again] == [{}, {"again": True}]

    async def test_nothing_is_sent_again_without_an_answer(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.fail_next("Pause", Fault.REFUSE_CONNECTION)
        engine.fail_next("GetOperation", *[Fault.REFUSE_CONNECTION] * 4)
        operation = await gateway.end_of(await gateway.give(DRAIN))
        received = [m for m, key in engine.received if key == operation.id]
        assert received == ["Pause", *["GetOperation"] * 5, "Pause"]

    async def test_an_engine_that_hangs_is_given_up_and_asked_for(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.fail_next("FlushCaches", Fault.HANG)
        operation = await gateway.give(FLUSH, deadline_ms=60_000)
        # It is carried out, and never says so on this stream; asked, it says that it has ended.
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert len(engine.orders) == 1

    async def test_the_replies_to_aborts_are_not_asked_for_again(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.fail_next("Abort", Fault.LOSE_REPLY)
        operation = await gateway.end_of(await gateway.give(AbortRequests(all=True)))
        assert operation.state is _S.SUCCEEDED
        assert operation.verification is Verification.UNVERIFIED
        assert operation.result is not None
        assert operation.result["all"] == "unverified"
        assert engine.rpcs["Abort"] == 1


class TestRefusedByTheEngine:
    async def test_a_refusal_is_a_failure_without_effect(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.fail_next("Pause", Fault.UNAUTHENTICATED)
        operation = await gateway.end_of(await gateway.give(DRAIN))
        assert operation.state is _S.FAILED
        assert operation.error is not None
        assert operation.error.reason == "ENGINE_AUTH_REFUSED"
        assert operation.error.effect is FailureEffect.NONE
        assert sent(engine, operation) == 1

    async def test_an_order_that_another_gateway_has_overtaken(
        self, gateway: Gateway, engine: EngineDouble, tmp_path: Path
    ) -> None:
        engine.engine.script("prepare", hang)
        running = await gateway.give(FLUSH)
        await until(lambda: engine.orders)
        (tmp_path / "other").mkdir()
        async with running_gateway(tmp_path / "other") as other:
            await other.register(engine.admin_address)
            refused = await other.end_of(await other.give(DRAIN))
        assert refused.error is not None
        assert (refused.error.code, refused.error.reason) == ("ABORTED", "ENGINE_BUSY")
        assert refused.error.retryable
        await gateway.orders.wait(running.id, 0)

    async def test_a_failure_is_told_as_the_engine_tells_it(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        async def fault(_order: object, _rank: int) -> None:
            raise ZeroDivisionError

        engine.engine.script("prepare", fault)
        operation = await gateway.end_of(await gateway.give(FLUSH))
        assert operation.state is _S.FAILED
        assert operation.error is not None
        assert operation.error.effect is FailureEffect.NONE
        assert operation.ranks


class TestEngineRestarts:
    async def test_one_that_remembers_says_how_it_ended(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        await engine.restart()
        ended = await gateway.end_of(operation)
        assert ended.state is _S.FAILED
        assert ended.error is not None
        assert (ended.error.reason, ended.error.effect) == (
            "ENGINE_RESTARTED",
            FailureEffect.UNKNOWN,
        )
        assert sent(engine, operation) == 2  # the second one attaches, and hears the end
        assert len(engine.orders) == 1

    async def test_one_that_remembers_nothing_is_not_ordered_again(
        self, gateway: Gateway, engine: EngineDouble, tmp_path: Path
    ) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        await engine.kill()
        await gateway.until(operation, _S.RECONCILING)
        rmtree(tmp_path / "engine")
        await engine.start()
        ended = await gateway.end_of(operation)
        assert ended.state is _S.FAILED
        assert ended.error is not None
        assert (ended.error.reason, ended.error.effect) == (
            "ENGINE_RESTARTED",
            FailureEffect.UNKNOWN,
        )
        assert sent(engine, operation) == 1

    async def test_the_slot_is_held_as_long_as_nothing_is_known(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(DRAIN, deadline_ms=2_000)
        await until(lambda: engine.orders)
        await engine.kill()
        await gateway.until(operation, _S.RECONCILING)
        gateway.clock.go(60)

        async def warned() -> bool:
            known = await gateway.ledger.operations.get(operation.id)
            assert known is not None
            return bool(known.warnings)

        await until(warned)
        assert (await gateway.fleet.engine("e1")).running_operation == operation.id
        await asyncio.sleep(0.5)
        known = await gateway.ledger.operations.get(operation.id)
        assert known is not None
        assert known.state is _S.RECONCILING
        assert [warning.reason for warning in known.warnings] == ["DEADLINE_PASSED"]
        await engine.start()
        assert (await gateway.end_of(operation)).state is _S.FAILED
        assert (await gateway.end_of(await gateway.give(FLUSH))).state is _S.SUCCEEDED

    async def test_an_engine_that_is_away_when_the_order_comes_is_waited_for(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        await engine.kill()
        gateway.clock.go(60)
        operation = await gateway.give(DRAIN)
        await asyncio.sleep(0.3)
        assert await gateway.state_of(operation) is _S.ACCEPTED
        await engine.start()
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert sent(engine, operation) == 1


class TestDeadlines:
    async def test_nothing_is_sent_after_the_deadline(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        await engine.kill()
        gateway.clock.go(60)
        operation = await gateway.give(DRAIN, deadline_ms=1_000)
        gateway.clock.go(60)
        ended = await gateway.end_of(operation)
        assert ended.state is _S.FAILED
        assert ended.error is not None
        assert (ended.error.reason, ended.error.effect) == (
            "DEADLINE_EXCEEDED",
            FailureEffect.NONE,
        )
        await engine.start()
        await gateway.end_of(await gateway.give(FLUSH))
        assert sent(engine, operation) == 0

    async def test_the_engine_ends_what_it_runs(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.engine.script("prepare", hang)
        ended = await gateway.end_of(await gateway.give(DRAIN, deadline_ms=1_500))
        assert ended.state is _S.FAILED
        assert ended.error is not None
        assert ended.error.code == "DEADLINE_EXCEEDED"
        assert ended.engine_sequence > 0

    async def test_what_did_not_arrive_by_then_is_not_sent_again(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.fail_next("Pause", Fault.REFUSE_CONNECTION)
        engine.fail_next("GetOperation", *[Fault.REFUSE_CONNECTION] * 200)
        operation = await gateway.give(DRAIN, deadline_ms=2_000)
        await gateway.until(operation, _S.RECONCILING)
        gateway.clock.go(60)
        await until(lambda: engine.rpcs["GetOperation"] > 3)
        while engine.take_fault("GetOperation"):
            pass
        ended = await gateway.end_of(operation)
        assert ended.error is not None
        assert (ended.error.reason, ended.error.effect) == (
            "DEADLINE_EXCEEDED",
            FailureEffect.NONE,
        )
        assert sent(engine, operation) == 1


class TestGatewayRestarts:
    async def test_what_was_accepted_and_not_sent_is_sent(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        await gateway.runner.stop(5.0)
        operation = await gateway.give(DRAIN)
        await gateway.restart()
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert sent(engine, operation) == 1

    async def test_what_ran_is_asked_for_and_goes_on(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        go = asyncio.Event()
        engine.engine.script("prepare", released_by(go))
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        await gateway.restart()
        await gateway.until(operation, _S.RUNNING)
        go.set()
        ended = await gateway.end_of(operation)
        assert ended.state is _S.SUCCEEDED
        assert len(engine.orders) == 1
        types = await gateway.types_of(operation.id)
        assert types.count("reconciling") == 1
        assert types.count("completed") == 1

    async def test_what_ended_meanwhile_is_told(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        go = asyncio.Event()
        engine.engine.script("prepare", released_by(go))
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        await gateway.stop()
        go.set()
        await gateway.start()
        ended = await gateway.end_of(operation)
        assert ended.state is _S.SUCCEEDED
        assert len(engine.orders) == 1

    async def test_a_cancellation_survives_it(self, gateway: Gateway, engine: EngineDouble) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        await gateway.runner.stop(5.0)
        asked = await gateway.orders.cancel(operation.id, CALLER)
        assert asked.state is _S.CANCELLING
        await gateway.restart()
        assert (await gateway.end_of(operation)).state is _S.CANCELLED

    async def test_what_was_written_as_sent_and_was_not_is_sent(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        """Killed between the entry and the call."""
        engine.fail_next("Pause", Fault.REFUSE_CONNECTION)
        engine.delays_s["GetOperation"] = 0.3
        operation = await gateway.give(DRAIN)
        await gateway.until(operation, _S.RECONCILING)
        await gateway.restart()
        engine.delays_s.clear()
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert len(engine.orders) == 1

    async def test_aborts_that_nobody_heard_of_end_unverified(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.delays_s["Abort"] = 30.0
        operation = await gateway.give(AbortRequests(request_ids=("r-1",)))
        await until(lambda: engine.rpcs["Abort"] == 1)
        await gateway.restart()
        ended = await gateway.end_of(operation)
        assert ended.verification is Verification.UNVERIFIED
        assert ended.result is not None
        assert ended.result["requests"] == [{"request_id": "r-1", "outcome": "unverified"}]
        assert engine.rpcs["Abort"] == 1

    async def test_stopping_leaves_orders_alone_and_ends_in_time(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        await gateway.runner.stop(5.0)
        await gateway.runner.stop(5.0)
        assert await gateway.state_of(operation) in (_S.RUNNING, _S.CANCELLING)
        assert engine.rpcs["CancelOperation"] == 0

    async def test_again_and_again(self, gateway: Gateway, engine: EngineDouble) -> None:
        go = asyncio.Event()
        engine.engine.script("prepare", released_by(go))
        operation = await gateway.give(DRAIN)
        for pause_s in (0.0, 0.002, 0.01, 0.05):
            await gateway.restart()
            await asyncio.sleep(pause_s)
        go.set()
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert len(engine.orders) == 1


class TestLeases:
    async def test_an_engine_driven_by_another_gateway_is_left_to_it(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        theirs = await gateway.ledger.leases.acquire("e1", "another", 30.0)
        assert theirs is not None
        operation = await gateway.give(DRAIN)
        await asyncio.sleep(0.3)
        assert await gateway.state_of(operation) is _S.ACCEPTED
        assert sent(engine, operation) == 0
        await gateway.ledger.leases.release(theirs)
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED

    async def test_one_whose_gateway_is_gone_is_taken_over(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        assert await gateway.ledger.leases.acquire("e1", "gone", 30.0) is not None
        operation = await gateway.give(DRAIN)
        await asyncio.sleep(0.1)
        gateway.clock.go(31)
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED

    async def test_who_has_lost_the_lease_writes_nothing_more(
        self, gateway: Gateway, engine: EngineDouble, caplog: pytest.LogCaptureFixture
    ) -> None:
        go = asyncio.Event()
        engine.engine.script("prepare", released_by(go))
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        gateway.clock.go(60)
        theirs = await gateway.ledger.leases.acquire("e1", "another", 30.0)
        assert theirs is not None
        before = await gateway.events_of(operation.id)
        with caplog.at_level(logging.WARNING):
            go.set()
            await asyncio.sleep(0.5)
        assert await gateway.events_of(operation.id) == before
        await gateway.ledger.leases.release(theirs)
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert len(engine.orders) == 1

    async def test_orders_of_another_gateway_are_driven_too(
        self, gateway: Gateway, engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Accepted elsewhere, on the same ledger: the holder of the lease sees to it."""
        engine.engine.script("prepare", hang)
        drain = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        monkeypatch.setattr(gateway.runner, "take", lambda *_given: None)
        abort = await gateway.give(AbortRequests(all=True))
        await gateway.end_of(abort)
        await gateway.orders.cancel(drain.id, CALLER)
        assert (await gateway.end_of(drain)).state is _S.CANCELLED


class TestChangesOfTheRegister:
    async def test_an_order_outlives_a_change_of_its_engines_registration(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        go = asyncio.Event()
        engine.engine.script("prepare", released_by(go))
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        await gateway.fleet.change("e1", EngineChange(labels={"pool": "b"}), 1, CALLER)
        go.set()
        assert (await gateway.end_of(operation)).state is _S.SUCCEEDED
        assert len(engine.orders) == 1


class TestManyEngines:
    async def test_one_that_hangs_holds_no_other_up(
        self, gateway: Gateway, engine: EngineDouble, tmp_path: Path
    ) -> None:
        engine.engine.script("prepare", hang)
        stuck = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        async with running_engine(tmp_path / "second") as second:
            await gateway.register(second.admin_address, "e2")
            commands: tuple[Command, ...] = (DRAIN, FLUSH)
            for command in commands:
                ended = await gateway.end_of(await gateway.give(command, "e2"))
                assert ended.state is _S.SUCCEEDED
        assert not (await gateway.orders.wait(stuck.id, 0)).done
