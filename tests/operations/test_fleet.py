"""Engines registered, read and watched."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from app.domain.engine import Dialect, Engine, HealthState, Member, TlsNames
from app.domain.errors import (
    ChadburnError,
    EngineAuthRefused,
    EngineExists,
    EngineFault,
    EngineHasOpenOperation,
    EngineReplyMalformed,
    EngineUnreachable,
    GenerationMismatch,
    InvalidArgument,
    UnknownEngine,
    UnsupportedDialect,
)
from app.domain.facts import EXTERNAL
from app.domain.kinds import PauseMode
from app.ledger.values import AuditFilter
from app.operations.fleet import Fleet
from app.operations.registering import EngineChange, EngineDraft
from tests.backends.scripted_engine import ScriptedEngine, status_with_info
from tests.doubles.engine import EngineDouble, Fault
from tests.enginekit.client import client_of
from tests.enginekit.minimal_engine import hang
from tests.operations.gateway import CALLER, DRAIN, FLUSH, Gateway, running_gateway, until

pytestmark = pytest.mark.anyio


def draft(engine_id: str = "e9", address: str = "127.0.0.1:1", **changes: Any) -> EngineDraft:
    values: dict[str, Any] = {
        "id": engine_id,
        "dialect": Dialect.OPENENGINE,
        "members": (Member(0, address, address),),
    }
    return EngineDraft(**(values | changes))


def known(engine: Engine) -> tuple[HealthState, str | None]:
    facts = engine.observed.facts
    return engine.observed.health, None if facts is None else facts.instance_id


class TestTheRegister:
    async def test_an_engine_is_read_as_soon_as_it_is_registered(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        registered = await gateway.fleet.engine("e1")
        assert known(registered) == (HealthState.SERVING, engine.instance_id)
        assert registered.observed.info["engine_name"] == "minimal"
        assert registered.observed.models[0]["model_id"] == "echo"
        assert registered.observed.capabilities is not None

    @pytest.mark.parametrize(
        ("wrong", "refusal"),
        [
            ({"engine_id": ""}, InvalidArgument),
            ({"engine_id": "A"}, InvalidArgument),
            ({"engine_id": "-a"}, InvalidArgument),
            ({"engine_id": "a" * 64}, InvalidArgument),
            ({"engine_id": "a/b"}, InvalidArgument),
            ({"engine_id": "e1"}, EngineExists),
            ({"dialect": Dialect.VLLM}, UnsupportedDialect),
            ({"members": ()}, InvalidArgument),
            ({"address": "10.0.0.1:1"}, InvalidArgument),
            ({"tls": TlsNames(credential="nobody")}, InvalidArgument),
            ({"labels": {"": "x"}}, InvalidArgument),
            ({"labels": {"a": "x" * 64}}, InvalidArgument),
            ({"labels": {f"l{n}": "" for n in range(33)}}, InvalidArgument),
        ],
    )
    async def test_what_is_not_registered_and_why_is_audited(
        self, gateway: Gateway, wrong: dict[str, Any], refusal: type[ChadburnError]
    ) -> None:
        with pytest.raises(refusal):
            await gateway.fleet.register(draft(**wrong), CALLER)
        page = await gateway.ledger.audit.page(AuditFilter(action="register_engine"))
        assert page.items[0].entry.outcome == "refused"
        assert page.items[0].entry.reason == refusal.reason or refusal is InvalidArgument

    async def test_a_change_leads_elsewhere(self, gateway: Gateway, engine: EngineDouble) -> None:
        other = ScriptedEngine()
        address = await other.start()
        before = (await gateway.fleet.engine("e1")).registration
        changed = await gateway.fleet.change(
            "e1",
            EngineChange(members=(Member(0, address, address),), labels={"pool": "a"}),
            before.generation,
            CALLER,
        )
        assert changed.registration.generation == before.generation + 1
        assert changed.registration.labels == {"pool": "a"}
        assert known(await gateway.fleet.reread("e1", 5.0)) == (HealthState.SERVING, "i-1")
        with pytest.raises(GenerationMismatch):
            await gateway.fleet.change("e1", EngineChange(), before.generation, CALLER)
        away = (Member(0, "10.0.0.1:1", "10.0.0.1:1"),)
        with pytest.raises(InvalidArgument):
            await gateway.fleet.change("e1", EngineChange(members=away), 2, CALLER)
        with pytest.raises(UnknownEngine):
            await gateway.fleet.change("nobody", EngineChange(), 1, CALLER)
        await other.stop()

    async def test_one_with_an_open_operation_stays(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        engine.engine.script("prepare", hang)
        operation = await gateway.give(DRAIN)
        with pytest.raises(EngineHasOpenOperation):
            await gateway.fleet.remove("e1", 1, CALLER)
        await gateway.orders.cancel(operation.id, CALLER)
        await gateway.end_of(operation)
        await gateway.fleet.remove("e1", 1, CALLER)
        with pytest.raises(UnknownEngine):
            await gateway.fleet.engine("e1")
        for read in (gateway.fleet.discover, gateway.fleet.load, gateway.fleet.fresh):
            with pytest.raises(UnknownEngine):
                await read("e1")
        assert (await gateway.ledger.operations.get(operation.id)) is not None


class TestReading:
    async def test_young_facts_are_not_read_again(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        before = engine.rpcs["GetAdminProfile"]
        for _ in range(5):
            await gateway.fleet.fresh("e1")
        assert engine.rpcs["GetAdminProfile"] == before
        gateway.clock.go(3)
        await asyncio.gather(*(gateway.fleet.fresh("e1") for _ in range(10)))
        assert engine.rpcs["GetAdminProfile"] == before + 1

    async def test_an_engine_that_is_gone_keeps_its_facts(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        instance_id = engine.instance_id
        await engine.kill()
        gateway.clock.go(10)
        gone = await gateway.fleet.reread("e1", 10.0)
        assert known(gone) == (HealthState.UNREACHABLE, instance_id)
        assert gone.observed.capabilities is not None
        facts = gone.observed.facts
        assert facts is not None
        assert gone.observed.observed_at is not None
        assert gone.observed.observed_at - facts.observed_at >= timedelta(seconds=10)
        with pytest.raises(EngineUnreachable):
            await gateway.fleet.discover("e1")
        with pytest.raises(EngineUnreachable):
            await gateway.fleet.load("e1")

    async def test_another_life_is_noticed(
        self, gateway: Gateway, engine: EngineDouble, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = engine.instance_id
        await engine.restart()
        with caplog.at_level(logging.WARNING):
            again = await gateway.fleet.reread("e1", 10.0)
        assert known(again) == (HealthState.SERVING, engine.instance_id)
        assert before in caplog.text
        assert engine.instance_id in caplog.text

    async def test_a_pause_is_ascribed_to_the_operation_or_to_somebody_else(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        async with client_of(engine) as client:
            await client.completed(client.pause(idempotency_key="somebody"))
            outside = (await gateway.fleet.reread("e1", 5.0)).observed.facts
            assert outside is not None
            assert outside.pause is not None
            assert (outside.pause.mode, outside.pause.by) == (PauseMode.DRAIN, EXTERNAL)
            # An id of the right shape is not enough: it must be an operation of this engine.
            await client.completed(client.resume(outside.pause_epoch))
            claimed = "01a22953-578a-7e41-8c42-ca499439ac6c"
            await client.completed(client.pause(idempotency_key=claimed))
        facts = (await gateway.fleet.reread("e1", 5.0)).observed.facts
        assert facts is not None
        assert facts.pause is not None
        assert facts.pause.by == EXTERNAL

    async def test_silence_has_reasons(self, tmp_path: Path) -> None:
        engine = ScriptedEngine()
        address = await engine.start()
        async with running_gateway(tmp_path) as gateway:
            await gateway.register(address)
            for code, error in (
                (StatusCode.UNAUTHENTICATED, EngineAuthRefused),
                (StatusCode.INTERNAL, EngineReplyMalformed),
                (StatusCode.UNIMPLEMENTED, EngineFault),
            ):
                engine.read_refusal = status_with_info(code, "WHATEVER")
                with pytest.raises(error):
                    await gateway.fleet.discover("e1")
                degraded = await gateway.fleet.engine("e1")
                assert known(degraded) == (HealthState.DEGRADED, "i-1")
        await engine.stop()

    async def test_an_engine_that_refuses_our_credential_gets_no_orders(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        gateway.clock.go(10)
        engine.fail_next("GetAdminProfile", *[Fault.UNAUTHENTICATED] * 5)
        ended = await gateway.end_of(await gateway.give(FLUSH))
        assert ended.error is not None
        assert ended.error.reason == "ENGINE_AUTH_REFUSED"
        assert engine.rpcs["FlushCaches"] == 0


class TestWatching:
    async def test_engines_are_looked_at_again_and_again(
        self, gateway: Gateway, engine: EngineDouble
    ) -> None:
        fleet = Fleet(
            gateway.ledger,
            gateway.fleet._backends,
            gateway.clock,
            observe_interval_s=0.02,
        )
        await fleet.start()
        await fleet.start()
        before = engine.rpcs["GetAdminProfile"]
        await until(lambda: engine.rpcs["GetAdminProfile"] > before + 2)

        async def sampled() -> bool:
            since = gateway.clock.now() - timedelta(hours=1)
            return len(await fleet.load_history("e1", since)) > 2

        await until(sampled)
        history = await fleet.load_history("e1", gateway.clock.now() - timedelta(hours=1))
        assert [sample.at for sample in history] == sorted(sample.at for sample in history)
        assert history[0].load["running_requests"] == 0
        later = gateway.clock.now() + timedelta(hours=1)  # it still looks
        assert await fleet.load_history("e1", later) == ()
        # What is older than an hour goes.
        gateway.clock.go(3601)

        async def forgotten() -> bool:
            since = gateway.clock.now() - timedelta(hours=3)
            return history[0] not in await fleet.load_history("e1", since)

        await until(forgotten)
        await engine.kill()

        async def lost() -> bool:
            return (await fleet.engine("e1")).observed.health is HealthState.UNREACHABLE

        await until(lost)
        await fleet.stop()
        await fleet.stop()

    async def test_one_that_was_removed_is_let_go(self, gateway: Gateway) -> None:
        fleet = Fleet(
            gateway.ledger, gateway.fleet._backends, gateway.clock, observe_interval_s=0.02
        )
        await fleet.start()
        await until(lambda: "e1" in fleet._lookouts)
        await gateway.fleet.remove("e1", 1, CALLER)
        await until(lambda: "e1" not in fleet._lookouts)
        await fleet.stop()

    async def test_a_fault_of_the_ledger_does_not_end_the_watch(
        self, gateway: Gateway, engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = 0
        watched = gateway.ledger.engines.watched

        async def failing() -> Any:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise ZeroDivisionError
            return await watched()

        fleet = Fleet(
            gateway.ledger, gateway.fleet._backends, gateway.clock, observe_interval_s=0.02
        )
        monkeypatch.setattr(gateway.ledger.engines, "watched", failing)
        await fleet.start()
        before = engine.rpcs["GetAdminProfile"]
        await until(lambda: engine.rpcs["GetAdminProfile"] > before)
        await fleet.stop()
