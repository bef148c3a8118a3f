"""A person's word against an engine that is not heard, or is heard too late."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from app.domain.errors import ChadburnError, NotReconciling, OperationEnded
from app.domain.kinds import OperationState, Verification
from app.domain.operation import Operation
from app.operations.settling import Settlements, Statement
from tests.doubles.engine import EngineDouble
from tests.enginekit.minimal_engine import hang
from tests.operations.gateway import CALLER, DRAIN, FLUSH, Gateway, running_gateway, until
from tests.operations.scripted_backend import ScriptedBackend, ScriptedBackends

pytestmark = pytest.mark.anyio

_S = OperationState
BURNT = Statement(end=_S.FAILED, reason="the machine burnt")


def settlements(gateway: Gateway) -> Settlements:
    return Settlements(gateway.ledger, gateway.runner, gateway.clock)


async def test_an_engine_that_comes_back_does_not_change_what_was_settled(
    gateway: Gateway, engine: EngineDouble
) -> None:
    engine.engine.script("prepare", hang)
    operation = await gateway.give(DRAIN)
    await until(lambda: engine.orders)
    await engine.kill()
    await gateway.until(operation, _S.RECONCILING)
    before = await gateway.fleet.engine("e1")
    settled = await settlements(gateway).settle(operation.id, BURNT, CALLER)
    assert (settled.state, settled.verification) == (_S.FAILED, Verification.SETTLED)
    after = await gateway.fleet.engine("e1")
    assert after.running_operation is None
    assert after.observed.facts == before.observed.facts

    following = await gateway.give(FLUSH)
    await engine.start()
    assert (await gateway.end_of(following)).state is _S.SUCCEEDED
    assert await gateway.ledger.operations.get(operation.id) == settled
    types = await gateway.types_of(operation.id)
    assert types[-2:] == ["reconciling", "settled"]


class _Deaf(ScriptedBackend):
    """Takes nothing on, and when asked does not answer."""

    def __init__(self) -> None:
        super().__init__(["lost on the way"] * 1_000)
        self.asked = asyncio.Event()
        self.left = asyncio.Event()

    async def find(self, operation_id: str, timeout_s: float) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


@pytest.mark.parametrize("told", [True, False], ids=["here", "by another gateway"])
async def test_asking_ends_in_the_middle_of_a_call(tmp_path: Path, told: bool) -> None:
    """Whether this process is told, or finds in the ledger that it is over."""
    deaf = _Deaf()
    async with running_gateway(
        tmp_path, make_backends=lambda _clock: ScriptedBackends({"e1": deaf})
    ) as gateway:
        await gateway.register("127.0.0.1:1")
        operation = await gateway.give(DRAIN)
        await gateway.until(operation, _S.RECONCILING)
        await deaf.asked.wait()
        here = settlements(gateway)
        if not told:
            here._runner = _Elsewhere()  # type: ignore[assignment]
        await here.settle(operation.id, BURNT, CALLER)
        async with asyncio.timeout(20):
            await deaf.left.wait()
        await until(lambda: "e1" not in gateway.runner._desks or gateway.runner._desks["e1"].idle)
        assert await gateway.types_of(operation.id) == [
            *("accepted", "dispatched", "reconciling", "settled")
        ]
        assert deaf.effects[operation.id] == 0


async def _is_past_sending(gateway: Gateway, operation: Operation) -> bool:
    return await gateway.state_of(operation) not in (_S.ACCEPTED, _S.RUNNING)


class _Elsewhere:
    """The runner of another process."""

    def take(self, operation: Operation) -> None:
        """It has nothing to do with this one's."""


async def test_of_a_word_and_a_late_answer_one_is_the_end(tmp_path: Path) -> None:
    """At the same moment, many times over: whoever was too late is told so, or has written
    nothing."""
    backend = ScriptedBackend()
    winners: set[Verification | None] = set()
    async with running_gateway(
        tmp_path, make_backends=lambda _clock: ScriptedBackends({"e1": backend})
    ) as gateway:
        await gateway.register("127.0.0.1:1")
        here = settlements(gateway)
        for turn in range(24):
            backend.sends = ["lost when taken on"]
            backend.finds = ["silent"] * (0, 1, 1_000)[turn % 3]
            operation = await gateway.give(DRAIN)
            await until(partial(_is_past_sending, gateway, operation))
            outcome: Operation | ChadburnError
            try:
                outcome = await here.settle(operation.id, BURNT, CALLER)
            except (OperationEnded, NotReconciling) as refused:
                outcome = refused
            ended = await gateway.end_of(operation)  # one terminal event, and no gap
            if isinstance(outcome, Operation):
                assert ended == outcome
            else:
                assert ended.state is _S.SUCCEEDED
                assert ended.verification is not Verification.SETTLED
            winners.add(ended.verification)
    assert Verification.SETTLED in winners
