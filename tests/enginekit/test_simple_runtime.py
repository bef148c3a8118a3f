"""The ready-made half of a runtime: what it does where an order goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.capabilities import Capabilities
from app.domain.commands import Command, FlushCaches
from app.domain.kinds import AbortOutcome, CacheKind, ContentPolicy, OperationKind, ResourceKind
from app.enginekit.in_flight import InFlight, RequestEnded
from app.enginekit.runtime import Conclusion, EngineDescription, RuntimeFault
from app.enginekit.simple_runtime import SimpleRuntime
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import generation_pb2, lifecycle_pb2
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client

pytestmark = pytest.mark.anyio


class Ticking(SimpleRuntime):
    """Says "tick" for as long as it is asked to, and does to orders what `carrying` says."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []  # the double's
        self.carrying: Any = None
        self.mute = False

    def describe(self) -> EngineDescription:
        return EngineDescription(name="ticking", version="1", models=("tick",))

    def capabilities(self) -> Capabilities:
        can = super().capabilities()
        more = {OperationKind.FLUSH_CACHES, OperationKind.RELEASE_RESOURCES}
        return replace(
            can,
            operations=can.operations | more,
            cache_kinds=frozenset({CacheKind.PREFIX}),
            resources={ResourceKind.KV_CACHE: frozenset(ContentPolicy)},
        )

    async def carry_out(self, command: Command) -> Conclusion:
        if self.carrying is None:
            return await super().carry_out(command)
        await self.carrying()
        return Conclusion()

    async def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        reason = generation_pb2.FINISH_REASON_LENGTH
        with self.requests.running(request.request_id) as mine:
            try:
                for _ in range(0 if self.mute else request.stopping.max_tokens or 4):
                    await asyncio.sleep(0.001)
                    await mine.turn()
                    yield generation_pb2.GenerateResponse(
                        token=generation_pb2.TokenOutput(text="tick ")
                    )
            except RequestEnded:
                reason = generation_pb2.FINISH_REASON_CANCELLED
            finished = generation_pb2.GenerationFinished(reason=reason)
            yield generation_pb2.GenerateResponse(finished=finished)


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    make: Any = Ticking
    async with running_engine(tmp_path / "engine", make_engine=make, straggler_s=0.2) as running:
        yield running


@pytest.fixture
def engine(double: EngineDouble) -> Ticking:
    found: Any = double.engine
    assert isinstance(found, Ticking)
    return found


async def broken() -> None:
    raise RuntimeFault("BROKEN", "it cannot")


async def test_an_order_that_is_not_carried_out_is_no_success(
    client: Client, engine: Ticking
) -> None:
    failed = await client.failed(client.flush())
    assert (failed.reason, failed.effect) == (
        "UNSUPPORTED_OPERATION",
        pb.FAILURE_EFFECT_ROLLED_BACK,
    )
    assert await client.generate().finish_reason() == "LENGTH"


async def test_what_cannot_be_taken_back_is_out_of_service(client: Client, engine: Ticking) -> None:
    engine.carrying = broken
    failed = await client.failed(client.release("kv_cache"))
    assert (failed.reason, failed.effect) == ("BROKEN", pb.FAILURE_EFFECT_APPLIED_IN_PART)
    assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT


async def test_what_is_refused_beforehand_changes_nothing(client: Client, engine: Ticking) -> None:
    async def check(command: Command) -> None:
        if command.kind is OperationKind.RELEASE_RESOURCES:
            await broken()

    engine.check = check  # type: ignore[method-assign]
    failed = await client.failed(client.release("kv_cache"))
    assert failed.effect == pb.FAILURE_EFFECT_NONE
    assert await client.admission() == "open"


async def test_a_pause_at_its_deadline_is_taken_back(client: Client, engine: Ticking) -> None:
    """An ABORT waits for its requests; one that does not end holds it up."""
    stuck = asyncio.Event()

    async def hold() -> None:
        with engine.requests.running("stuck"):
            await stuck.wait()

    holding = asyncio.create_task(hold())
    frozen = await client.completed(client.pause("keep"))
    failed = await client.failed(client.pause("abort", deadline_ms=100))
    assert failed.reason == "DEADLINE_EXCEEDED"
    assert engine.requests.frozen
    assert (await client.profile()).pause_epoch == frozen.pause.pause_epoch
    stuck.set()
    await holding


async def test_a_probe_is_a_generation(client: Client, engine: Ticking) -> None:
    async def health() -> Any:
        answer = await client.control.Health(
            lifecycle_pb2.HealthRequest(include_inference_probe=True), timeout=30
        )
        return answer.state

    assert await health() == lifecycle_pb2.HealthState.HEALTH_STATE_READY
    engine.mute = True
    assert await health() == lifecycle_pb2.HealthState.HEALTH_STATE_NOT_READY


async def test_requests_are_remembered_for_a_while() -> None:
    requests = InFlight()
    for number in range(5000):
        with requests.running(f"r{number}"):
            assert len(requests) == 1
    tally = await requests.end(("r0", "r4999", "never"), "why")
    assert dict(tally.outcomes) == {
        "r0": AbortOutcome.NOT_FOUND,
        "r4999": AbortOutcome.ALREADY_FINISHED,
        "never": AbortOutcome.NOT_FOUND,
    }


async def test_only_a_flush_is_harmless_by_itself() -> None:
    engine = Ticking()
    await engine.undo(FlushCaches(caches=(CacheKind.PREFIX,)))
