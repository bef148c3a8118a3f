"""Inline tensors on their way: kept by the gateway until the engine has answered, and no longer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from app.domain.commands import PauseAround, UpdateWeights
from app.domain.kinds import CachePolicy, OperationState, PauseMode, TensorDtype
from app.domain.weight_sources import InlineTensor, InlineWeights, TensorSpec
from app.enginekit.runtime import Order
from app.ledger import Ledger
from tests.doubles.engine import EngineDouble, Fault, running_engine
from tests.enginekit.full_engine import FullEngine
from tests.operations.gateway import CALLER, Gateway

pytestmark = pytest.mark.anyio

DATA = (b"canary-1" * 2, b"canary-2" * 2)
SPECS = [TensorSpec(name, TensorDtype.FLOAT32, (2, 2)) for name in ("a", "b")]
UPDATE = UpdateWeights(
    source=InlineWeights(tuple(map(InlineTensor.carrying, SPECS, DATA))),
    weight_version="v2",
    cache_policy=CachePolicy.FLUSH,
    admission=PauseAround(PauseMode.DRAIN),
)


@pytest.fixture
def received() -> list[bytes | None]:
    """What reached rank 0."""
    return []


@pytest.fixture
async def engine(tmp_path: Path, received: list[bytes | None]) -> AsyncIterator[EngineDouble]:
    async def look(order: Order, _rank: int) -> None:
        if isinstance(order.command, UpdateWeights):
            received.append(order.command.payload)

    def make() -> FullEngine:
        made = FullEngine(world_size=2)
        made.scripts["prepare", 0] = look
        return made

    async with running_engine(tmp_path / "engine", make_engine=make) as double:
        yield double


@pytest.fixture(params=["sqlite", "postgres"])
async def gateway(
    request: pytest.FixtureRequest, tmp_path: Path, engine: EngineDouble
) -> AsyncIterator[Gateway]:
    url = f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
    made = Gateway(url)
    await made.start()
    await made.register(engine.admin_address)
    try:
        yield made
    finally:
        await made.stop()


async def test_they_reach_the_ranks_and_are_gone_when_it_has_ended(
    gateway: Gateway, received: list[bytes | None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ended = await gateway.end_of(await gateway.give(UPDATE))
    assert ended.state is OperationState.SUCCEEDED, ended.error
    assert received == [b"".join(DATA)]
    assert await gateway.ledger.payloads.get(ended.id) is None
    tensors = cast("dict[str, Any]", ended.request["source"])["inline"]["tensors"]
    assert [set(one) for one in tensors] == [{"name", "dtype", "shape", "sha256"}] * 2
    assert "canary" not in f"{ended} {await gateway.events_of(ended.id)} {caplog.text}"


async def test_a_gateway_that_was_restarted_sends_them_all_the_same(
    gateway: Gateway, engine: EngineDouble, received: list[bytes | None]
) -> None:
    await engine.kill()
    operation = await gateway.give(UPDATE)
    await gateway.restart()
    assert await gateway.state_of(operation) is OperationState.ACCEPTED
    await engine.start()
    ended = await gateway.end_of(operation)
    assert ended.state is OperationState.SUCCEEDED, ended.error
    assert received == [b"".join(DATA)]


@pytest.mark.parametrize("how", [Fault.LOSE_REPLY, Fault.REFUSE_CONNECTION])
async def test_a_lost_reply_is_attached_to_with_the_same_bytes(
    gateway: Gateway, engine: EngineDouble, received: list[bytes | None], how: Fault
) -> None:
    engine.fail_next("UpdateWeights", how)
    ended = await gateway.end_of(await gateway.give(UPDATE))
    assert ended.state is OperationState.SUCCEEDED, ended.error
    assert received == [b"".join(DATA)]


async def test_what_is_cancelled_unsent_leaves_none(gateway: Gateway, engine: EngineDouble) -> None:
    await engine.kill()
    operation = await gateway.give(UPDATE)
    assert await gateway.ledger.payloads.get(operation.id) == b"".join(DATA)
    # One that is just being tried ends when the attempt has.
    await gateway.orders.cancel(operation.id, CALLER)
    ended = await gateway.end_of(operation)
    assert ended.state is OperationState.CANCELLED
    assert await gateway.ledger.payloads.get(operation.id) is None


class Forgetful:
    """A ledger that has lost what went with the orders."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.payloads = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def get(self, _operation_id: str) -> bytes | None:
        return None


async def test_an_order_without_its_tensors_is_never_sent(
    tmp_path: Path, engine: EngineDouble, received: list[bytes | None]
) -> None:
    made = Gateway(f"sqlite+aiosqlite:///{tmp_path}/forgetful.db", seen_as=Forgetful)
    await made.start()
    try:
        await made.register(engine.admin_address)
        ended = await made.end_of(await made.give(UPDATE))
    finally:
        await made.stop()
    assert ended.error is not None
    assert (ended.error.code, ended.error.reason) == ("DATA_LOSS", "PAYLOAD_LOST")
    assert received == []
    assert engine.rpcs["UpdateWeights"] == 0
