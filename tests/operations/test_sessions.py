"""Weight sessions over what may happen to a gateway: it restarts, and it is one of two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.clock import uuid7
from app.domain.commands import PauseAround, UpdateWeights
from app.domain.errors import ChunkOutOfOrder, SessionClosed, UnknownSession
from app.domain.kinds import CachePolicy, OperationState, PauseMode
from app.domain.operation import Actor, Operation
from app.domain.weight_sessions import (
    AbortSession,
    Chunk,
    CommitSession,
    DiskChunk,
    DiskTransfer,
    SessionStage,
    SessionWeights,
    Stage,
)
from app.operations.callers import Caller
from app.operations.sessions import StageRequest, is_staged
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.minimal_engine import until as until_set
from tests.enginekit.session_engine import COMPLETE, SessionEngine
from tests.operations.gateway import ALICE, Gateway, running_gateway

pytestmark = pytest.mark.anyio

BOB = Actor("https://issuer.test", "bob", "cli")
BEGIN = UpdateWeights(
    source=SessionWeights("s1", DiskTransfer("/models/v2")),
    weight_version="v2",
    cache_policy=CachePolicy.FLUSH,
    admission=PauseAround(PauseMode.DRAIN),
)


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    make = lambda: SessionEngine(world_size=2)  # noqa: E731
    async with running_engine(tmp_path / "engine", make_engine=make) as running:
        yield running


@pytest.fixture
async def gateway(tmp_path: Path, double: EngineDouble) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        await running.register(double.admin_address)
        yield running


def engine_of(double: EngineDouble) -> SessionEngine:
    assert isinstance(double.engine, SessionEngine)
    return double.engine


def chunk(index: int, *files: str) -> Chunk:
    return Chunk(index, DiskChunk(files or (f"part-{index}",)))


def request(stage: Stage, actor: Actor = ALICE, **more: Any) -> StageRequest:
    values: dict[str, Any] = {"key": uuid7(), "fingerprint": repr(stage)}
    return StageRequest(
        engine_id="e1",
        command=SessionStage("s1", stage),
        actor=actor,
        caller=Caller(actor=actor),
        **(values | more),
    )


async def go_on(gateway: Gateway, stage: Stage, **more: Any) -> Operation:
    return (await gateway.sessions.go_on(request(stage, **more))).operation


async def staged(gateway: Gateway, operation: Operation, index: int) -> Operation:
    seen = await gateway.sessions.staged(operation.id, index, 20.0)
    assert is_staged(seen, index) or seen.done
    return seen


async def test_calls_that_come_before_the_engine_has_the_first(
    gateway: Gateway, double: EngineDouble
) -> None:
    double.delays_s["UpdateWeights"] = 0.2
    begun = await gateway.give(BEGIN)
    for stage in (chunk(0), chunk(1, COMPLETE), CommitSession(2)):
        assert (await go_on(gateway, stage)).id == begun.id
    with pytest.raises(SessionClosed):
        await go_on(gateway, chunk(2))
    assert (await gateway.end_of(begun)).state is OperationState.SUCCEEDED
    assert list(engine_of(double).staged.values()) == [[0, 1], [0, 1]]


async def test_a_restart_of_the_gateway_in_the_middle(
    gateway: Gateway, double: EngineDouble
) -> None:
    begun = await gateway.give(BEGIN)
    await go_on(gateway, chunk(0))
    await staged(gateway, begun, 0)
    engine = engine_of(double)
    let_go = asyncio.Event()
    engine.script("stage", until_set(let_go))
    await go_on(gateway, chunk(1, COMPLETE))
    await gateway.restart()
    let_go.set()
    await go_on(gateway, CommitSession(2))
    assert (await gateway.end_of(begun)).state is OperationState.SUCCEEDED
    assert list(engine.staged.values()) == [[0, 1], [0, 1]]


async def test_accepted_and_left_lying_it_is_sent_by_the_next_life(
    gateway: Gateway, double: EngineDouble
) -> None:
    begun = await gateway.give(BEGIN)
    await go_on(gateway, chunk(0, COMPLETE))
    await staged(gateway, begun, 0)
    await gateway.runner.stop(5.0)
    await go_on(gateway, CommitSession(1))  # nobody drives it
    await gateway.restart()
    assert (await gateway.end_of(begun)).state is OperationState.SUCCEEDED


async def test_of_two_calls_for_one_place_one_is_taken(gateway: Gateway) -> None:
    begun = await gateway.give(BEGIN)
    calls = [go_on(gateway, chunk(0, f"by-{number}")) for number in range(6)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    taken = [one for one in results if isinstance(one, Operation)]
    assert [one.id for one in taken] == [begun.id]
    assert sum(isinstance(one, ChunkOutOfOrder) for one in results) == 5
    await go_on(gateway, AbortSession())
    assert (await gateway.end_of(begun)).state is OperationState.CANCELLED


async def test_a_call_in_parallel_under_one_key_is_one_call(
    gateway: Gateway, double: EngineDouble
) -> None:
    begun = await gateway.give(BEGIN)
    same = request(chunk(0, COMPLETE))
    accepted = await asyncio.gather(*(gateway.sessions.go_on(same) for _ in range(6)))
    assert {one.operation.id for one in accepted} == {begun.id}
    assert sum(one.fresh for one in accepted) == 1
    await go_on(gateway, CommitSession(1))
    assert (await gateway.end_of(begun)).state is OperationState.SUCCEEDED
    assert list(engine_of(double).staged.values()) == [[0], [0]]


async def test_what_was_sent_is_kept_no_longer_than_the_operation(gateway: Gateway) -> None:
    begun = await gateway.give(BEGIN)
    await go_on(gateway, chunk(0, COMPLETE))
    assert (await gateway.ledger.stages.taken(begun.id)).chunks == 1
    await go_on(gateway, CommitSession(1))
    await gateway.end_of(begun)
    assert (await gateway.ledger.stages.taken(begun.id)).calls == 0
    assert await gateway.ledger.stages.after(begun.id, 0, 10) == ()


async def test_a_session_is_its_beginners(gateway: Gateway) -> None:
    begun = await gateway.give(BEGIN)
    with pytest.raises(UnknownSession):
        await go_on(gateway, chunk(0), actor=BOB)
    with pytest.raises(UnknownSession):
        await go_on(gateway, chunk(0), model="other")
    await go_on(gateway, AbortSession())
    assert (await gateway.end_of(begun)).state is OperationState.CANCELLED
    with pytest.raises(UnknownSession):
        await go_on(gateway, chunk(0))


async def test_an_engine_that_is_away_for_a_while_gets_what_was_taken_on(
    gateway: Gateway, double: EngineDouble
) -> None:
    """It is a new process, which has none of the pieces, and says so."""
    begun = await gateway.give(BEGIN)
    await go_on(gateway, chunk(0))
    await staged(gateway, begun, 0)
    await double.kill()
    await go_on(gateway, chunk(1, COMPLETE))
    await go_on(gateway, CommitSession(2))
    await double.start()
    end = await gateway.end_of(begun)
    assert end.state is OperationState.FAILED
    assert end.error is not None
    assert end.error.reason == "ENGINE_RESTARTED"
