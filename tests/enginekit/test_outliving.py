"""Engines that others may pause past the kit, and what a runtime may say beside its results."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.capabilities import Capabilities
from app.domain.commands import Pause, Resume
from app.domain.kinds import AbortOutcome, DrainRule, NewRequests, PauseMode
from app.domain.operation import OperationWarning
from app.enginekit.runtime import (
    AbortTally,
    Conclusion,
    Holding,
    Observation,
    Order,
    RuntimeFault,
)
from app.rpc.openengine.v1 import lifecycle_pb2
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, client_of, pb, refused, until
from tests.enginekit.full_engine import FullEngine
from tests.enginekit.minimal_engine import MinimalEngine

pytestmark = pytest.mark.anyio


class Outlived(MinimalEngine):
    """Whoever pauses it says so in `held`; else it is what the kit's orders have made it."""

    held: PauseMode | None = None
    told = False

    async def observe(self) -> Observation:
        return replace(await super().observe(), holding=Holding(self.held) if self.told else None)

    async def conclude(self, order: Order) -> Conclusion:
        concluded = await super().conclude(order)
        match order.command:
            case Pause(mode=mode):
                self.held = mode
            case Resume():
                self.held = None
        return replace(concluded, warnings=(OperationWarning("BY_THE_WAY", "said"),))


def _engine(double: EngineDouble) -> Outlived:
    assert isinstance(double.engine, Outlived)
    double.engine.told = True
    return double.engine


async def _is(client: Client, admission: str) -> bool:
    return await client.admission() == admission


async def test_a_pause_by_others_is_a_pause_that_can_be_resumed(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, make_engine=Outlived) as double,
        client_of(double) as client,
    ):
        engine = _engine(double)
        before = await client.profile()
        engine.held = PauseMode.KEEP
        await until(lambda: _is(client, "paused"))
        profile = await client.profile()
        pause = profile.state.pause
        assert (pause.operation_id, pause.idempotency_key) == ("external", "")
        assert (pause.mode, pause.epoch) == (pb.PAUSE_MODE_KEEP, profile.pause_epoch)
        assert profile.pause_epoch == before.pause_epoch + 1
        assert profile.revision > before.revision
        held = client.generate()
        await client.held(1)
        await client.completed(client.resume(profile.pause_epoch))
        await held.end()
        assert engine.held is None


async def test_a_resume_by_others_lets_in_what_was_held(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, make_engine=Outlived) as double,
        client_of(double) as client,
    ):
        engine = _engine(double)
        paused = await client.completed(client.pause("abort"))
        assert await client.admission() == "paused"
        held = client.generate()
        await client.held(1)
        engine.held = None
        await until(lambda: _is(client, "open"))
        await held.end()
        refusal = await refused(client.stream(client.resume(paused.pause.pause_epoch)))
        assert refusal.reason == "NOT_PAUSED"


async def test_an_engine_that_is_paused_when_its_administration_begins(tmp_path: Path) -> None:
    def made() -> Outlived:
        engine = Outlived()
        engine.told, engine.held = True, PauseMode.ABORT
        return engine

    async with (
        running_engine(tmp_path, make_engine=made) as double,
        client_of(double) as client,
    ):
        profile = await client.profile()
        assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
        assert profile.state.pause.epoch == profile.pause_epoch
        first = profile.pause_epoch
        await double.restart()
        assert (await client.profile()).pause_epoch > first


async def test_what_a_runtime_has_to_say_is_a_warning_of_the_operation(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, make_engine=Outlived) as double,
        client_of(double) as client,
    ):
        events = await client.order(client.pause("abort"))
        assert [event.warning.reason for event in events if event.HasField("warning")] == [
            "BY_THE_WAY"
        ]
        assert events[-1].completed.verification == pb.VERIFICATION_VERIFIED


async def test_a_runtime_narrows_what_the_kit_would_offer(tmp_path: Path) -> None:
    def made() -> FullEngine:
        engine = FullEngine(world_size=1)
        offered: Capabilities = engine.offered
        engine.offered = replace(
            offered,
            new_requests=frozenset({NewRequests.HOLD}),
            drain_rules=frozenset({DrainRule.WAIT}),
        )
        return engine

    async with (
        running_engine(tmp_path, make_engine=made) as double,
        client_of(double) as client,
    ):
        profile = await client.profile()
        assert list(profile.new_requests) == [pb.NEW_REQUESTS_HOLD]
        assert list(profile.drain_rules) == [pb.DRAIN_RULE_WAIT]
        refusal = await refused(client.stream(client.pause("abort", new_requests="refuse")))
        assert refusal.code.name == "UNIMPLEMENTED"


class Unsure(MinimalEngine):
    async def abort(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        return AbortTally(dict.fromkeys(request_ids or ("a", "b"), AbortOutcome.UNVERIFIED))


async def test_an_abort_that_nobody_saw_taking_effect(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, make_engine=Unsure) as double,
        client_of(double) as client,
    ):
        for asked in (
            lifecycle_pb2.AbortRequest(request_id="a"),
            lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests()),
        ):
            answer = await client.control.Abort(asked)
            assert answer.status == lifecycle_pb2.ABORT_STATUS_UNSPECIFIED
            assert "not seen to have ended" in answer.message


class TakenApart(FullEngine):
    """Its preparation reaches what is live, and a rollback says so."""

    async def prepare(self, order: Order, rank: int) -> None:
        raise RuntimeFault("BROKE_OFF", "no")

    async def rollback(self, order: Order, rank: int) -> None:
        raise RuntimeFault("TAKEN_APART", "neither old nor new", applied=True)


async def test_a_preparation_that_leaves_something_behind(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, make_engine=lambda: TakenApart(world_size=1)) as double,
        client_of(double) as client,
    ):
        failed = await client.failed(client.update("v2", pause="abort"))
        assert (failed.reason, failed.effect) == ("BROKE_OFF", pb.FAILURE_EFFECT_APPLIED_IN_PART)
        state = (await client.profile()).state
        assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT


class Shared(MinimalEngine):
    """With requests of its own, which its preparation of a drain waits for."""

    elsewhere = 1

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.gone = asyncio.Event()

    async def others(self) -> int:
        return self.elsewhere

    async def prepare(self, order: Order, rank: int) -> None:
        if isinstance(order.command, Pause) and self.elsewhere:
            await self.gone.wait()
        await super().prepare(order, rank)


async def test_a_drain_of_requests_past_the_gate(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, make_engine=Shared) as double,
        client_of(double) as client,
    ):
        engine = double.engine
        assert isinstance(engine, Shared)
        drain = await client.begin(client.pause("drain"))
        await until(lambda: _is(client, "draining"))
        refusal = await refused(client.stream(client.resume((await client.profile()).pause_epoch)))
        assert refusal.reason in ("DRAIN_RUNNING", "ENGINE_BUSY", "STALE_PAUSE_EPOCH")
        await client.cancel(drain.events[0].operation_id)
        assert (await drain.end()).HasField("cancelled")
        assert await client.admission() == "open"
        engine.elsewhere = 0
        await client.completed(client.pause("drain"))
        assert await client.admission() == "paused"
