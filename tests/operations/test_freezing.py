"""An order that was accepted before a freeze and waits for its engine."""

from __future__ import annotations

from datetime import timedelta

import pytest

from app.domain.kinds import FailureEffect, OperationState
from app.domain.operation import Operation
from app.operations.freezing import Freezes
from tests.doubles.engine import EngineDouble
from tests.operations.gateway import CALLER, DRAIN, Gateway

pytestmark = pytest.mark.anyio


async def waiting_in_a_freeze(
    gateway: Gateway, engine: EngineDouble, *, override: bool = False
) -> Operation:
    """Accepted while its engine is away, and only then frozen."""
    await engine.kill()
    gateway.clock.go(60)
    operation = await gateway.give(DRAIN, deadline_ms=3_600_000, override_freeze=override)
    until = gateway.clock.now() + timedelta(minutes=10)
    window = Freezes(gateway.ledger, gateway.fleet, gateway.clock)
    await window.freeze("e1", "holidays", until, CALLER)
    assert await gateway.state_of(operation) is OperationState.ACCEPTED
    return operation


async def test_it_is_not_sent_when_the_engine_is_back(
    gateway: Gateway, engine: EngineDouble
) -> None:
    operation = await waiting_in_a_freeze(gateway, engine)
    await engine.start()
    ended = await gateway.end_of(operation)
    assert ended.error is not None
    assert (ended.error.reason, ended.error.code) == ("ENGINE_FROZEN", "FAILED_PRECONDITION")
    assert ended.error.message.endswith(": holidays")
    assert ended.error.effect is FailureEffect.NONE
    assert await gateway.types_of(operation.id) == ["accepted", "failed"]
    assert engine.orders == []


async def test_it_is_sent_if_it_overrides_freezes(gateway: Gateway, engine: EngineDouble) -> None:
    operation = await waiting_in_a_freeze(gateway, engine, override=True)
    await engine.start()
    assert (await gateway.end_of(operation)).state is OperationState.SUCCEEDED


async def test_it_is_sent_if_the_freeze_is_over_by_then(
    gateway: Gateway, engine: EngineDouble
) -> None:
    operation = await waiting_in_a_freeze(gateway, engine)
    gateway.clock.go(601)
    await engine.start()
    assert (await gateway.end_of(operation)).state is OperationState.SUCCEEDED
