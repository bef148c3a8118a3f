"""Two gateways on one ledger: one of them drives an engine, and both serve callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from app.domain.commands import AbortRequests
from app.domain.errors import EngineBusy
from app.domain.kinds import OperationState
from tests.doubles.engine import EngineDouble
from tests.enginekit.minimal_engine import hang
from tests.enginekit.minimal_engine import until as released_by
from tests.operations.gateway import (
    CALLER,
    DRAIN,
    FLUSH,
    Gateway,
    ShiftedClock,
    request,
    until,
)

pytestmark = pytest.mark.anyio


@dataclass
class Pair:
    first: Gateway
    second: Gateway
    clock: ShiftedClock


@pytest.fixture
async def pair(postgres_url: str, engine: EngineDouble) -> AsyncIterator[Pair]:
    clock = ShiftedClock()
    first, second = (Gateway(postgres_url, clock=clock) for _ in range(2))
    await first.start()
    await second.start()
    await first.register(engine.admin_address)
    try:
        yield Pair(first, second, clock)
    finally:
        await first.stop()
        await second.stop()


async def test_either_may_be_asked_and_the_engine_hears_it_once(
    pair: Pair, engine: EngineDouble
) -> None:
    wanted = request(FLUSH, key="k")
    answers = await asyncio.gather(
        *(gateway.orders.submit(wanted) for gateway in (pair.first, pair.second) * 5)
    )
    assert len({answer.operation.id for answer in answers}) == 1
    for gateway in (pair.first, pair.second):
        ended = await gateway.end_of(answers[0].operation)
        assert ended.state is OperationState.SUCCEEDED
    assert len(engine.orders) == 1


async def test_the_slot_is_one_for_both(pair: Pair, engine: EngineDouble) -> None:
    engine.engine.script("prepare", hang)
    running = await pair.first.give(DRAIN)
    with pytest.raises(EngineBusy) as busy:
        await pair.second.give(FLUSH)
    assert busy.value.operation_id == running.id


async def test_what_one_accepts_the_other_drives(pair: Pair, engine: EngineDouble) -> None:
    engine.engine.script("prepare", hang)
    drain = await pair.first.give(DRAIN)
    await until(lambda: engine.orders)
    abort = await pair.second.give(AbortRequests(all=True))
    assert (await pair.second.end_of(abort)).state is OperationState.SUCCEEDED
    await pair.second.orders.cancel(drain.id, CALLER)
    assert (await pair.second.end_of(drain)).state is OperationState.CANCELLED


async def test_one_line_for_both(pair: Pair, engine: EngineDouble) -> None:
    go = asyncio.Event()
    engine.engine.script("prepare", released_by(go))
    drain = await pair.first.give(DRAIN)
    given = await asyncio.gather(
        *(gateway.give(FLUSH, when_busy="queue") for gateway in (pair.first, pair.second) * 3)
    )
    line = await pair.second.ledger.operations.line("e1")
    assert (line.holder, set(line.waiting)) == (drain.id, {each.id for each in given})
    go.set()
    for operation in given:
        assert (await pair.second.end_of(operation)).state is OperationState.SUCCEEDED
    arrived = [key for method, key in engine.received if method in ("Pause", "FlushCaches")]
    assert list(dict.fromkeys(arrived)) == [drain.id, *line.waiting]


async def test_what_a_gateway_leaves_lying_the_other_takes_up(
    pair: Pair, engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()
    engine.engine.script("prepare", released_by(go))
    operation = await pair.first.give(DRAIN)
    await until(lambda: engine.orders)

    async def not_released(_lease: object) -> None:
        """As when the process is killed."""

    holder = pair.first if figure(pair.first, "chadburn_leases_held") else pair.second
    monkeypatch.setattr(holder.ledger.leases, "release", not_released)
    await holder.runner.stop(5.0)
    pair.clock.go(10)
    go.set()
    assert (await pair.second.end_of(operation)).state is OperationState.SUCCEEDED
    assert len(engine.orders) == 1
    other = pair.second if holder is pair.first else pair.first
    assert figure(other, "chadburn_leases_taken_over_total") == 1
    assert figure(holder, "chadburn_leases_lost_total") == 0, "it let go by itself"


async def test_a_lease_that_somebody_else_has_taken_is_lost(
    pair: Pair, engine: EngineDouble
) -> None:
    engine.engine.script("prepare", hang)
    await pair.first.give(DRAIN)
    await until(lambda: engine.orders)
    holder = pair.first if figure(pair.first, "chadburn_leases_held") else pair.second
    leases = holder.ledger.leases
    while await leases.acquire("e1", "a third", 60.0) is None:
        pair.clock.go(30)
    await until(lambda: figure(holder, "chadburn_leases_lost_total"))
    assert figure(holder, "chadburn_leases_held") == 0


def figure(gateway: Gateway, name: str) -> float:
    return gateway.watched.metrics.registry.get_sample_value(name) or 0.0
