"""A gateway that stands still between what it has decided and what it does, while another one on
the same ledger goes on with its orders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from app.backends.port import Order
from app.domain.engine import Engine
from app.domain.kinds import FailureEffect, OperationState
from app.domain.operation import Operation
from app.domain.transitions import Fact
from tests.doubles.engine import EngineDouble
from tests.operations.gateway import DRAIN, Gateway, ShiftedClock, until

pytestmark = pytest.mark.anyio


class Still:
    """The way to the engine, and the ledger's leases, of a process that does not get on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def carry_out(self, order: Order) -> AsyncGenerator[Fact, None]:
        self.reached.set()
        await self.go.wait()
        async with aclosing(self._inner.carry_out(order)) as facts:
            async for fact in facts:
                yield fact


@dataclass
class Pair:
    still: Gateway
    other: Gateway
    way: Still
    clock: ShiftedClock

    async def sent_late(self, **more: Any) -> Operation:
        """An order that is decided to be sent, and is not, until the lease has run out and the
        other one has come to an end with it."""
        operation = await self.still.give(DRAIN, **more)
        await self.way.reached.wait()
        self.clock.go(10)
        await self.other.runner.start()
        return await self.other.end_of(operation)

    async def goes_on(self) -> None:
        """The one that stood still, until it has let go."""
        self.way.go.set()
        await until(lambda: all(desk.idle for desk in self.still.runner._desks.values()))


@asynccontextmanager
async def _pair(postgres_url: str, engine: EngineDouble) -> AsyncIterator[Pair]:
    clock = ShiftedClock()
    still, other = (Gateway(postgres_url, clock=clock) for _ in range(2))
    await still.start()
    await other.open()
    try:
        await still.register(engine.admin_address)
        yield Pair(still, other, Still(await still.fleet.backend("e1")), clock)
    finally:
        await still.stop()
        await other.stop()


@pytest.fixture
async def pair(
    postgres_url: str, engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    async with _pair(postgres_url, engine) as made:
        renew = made.still.ledger.leases.renew

        def backend_of(_engine: Engine) -> Any:
            return made.way

        async def renewed(*args: Any) -> Any:
            await made.way.go.wait()
            return await renew(*args)

        monkeypatch.setattr(made.still.fleet, "backend_of", backend_of)
        monkeypatch.setattr(made.still.ledger.leases, "renew", renewed)
        yield made


async def test_what_others_have_ended_as_never_sent_is_not_sent(
    pair: Pair, engine: EngineDouble
) -> None:
    ended = await pair.sent_late(deadline_ms=5_000)
    assert ended.state is OperationState.FAILED
    assert ended.error is not None
    assert (ended.error.reason, ended.error.effect) == ("DEADLINE_EXCEEDED", FailureEffect.NONE)
    await pair.goes_on()
    assert engine.orders == []
    assert engine.rpcs["Pause"] == 0


async def test_what_others_have_sent_is_not_sent_once_more(
    pair: Pair, engine: EngineDouble
) -> None:
    ended = await pair.sent_late()
    assert ended.state is OperationState.SUCCEEDED
    await pair.goes_on()
    assert engine.rpcs["Pause"] == 1
    assert len(engine.orders) == 1
