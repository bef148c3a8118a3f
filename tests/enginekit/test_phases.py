"""Corners of the two phases that no client can reach on purpose."""

from __future__ import annotations

import asyncio

import pytest

from app.domain.commands import Pause
from app.domain.kinds import FailureEffect, PauseMode
from app.domain.ranks import RankReport
from app.enginekit.phases import CancelAsked, Interrupts, OrderFailed, Timings, TwoPhase
from app.enginekit.runtime import Order
from tests.enginekit.minimal_engine import MinimalEngine

pytestmark = pytest.mark.anyio

TIMINGS = Timings(cancel_grace_s=5, rollback_timeout_s=5, straggler_s=5)


def interrupts(seconds: float = 60) -> Interrupts:
    return Interrupts(asyncio.get_running_loop().time() + seconds, TIMINGS)


async def test_what_was_cancelled_before_it_began_does_not_begin() -> None:
    watch = interrupts()
    watch.cancelled.set()
    begun = False

    async def work() -> None:
        nonlocal begun
        begun = True

    with pytest.raises(CancelAsked):
        await watch.guard(work(), cancellable=True)
    assert not begun
    await watch.guard(work(), cancellable=False)
    assert begun


async def test_a_fault_of_our_own_between_the_ranks_is_rolled_back_too() -> None:
    engine = MinimalEngine(world_size=2)
    told: list[RankReport] = []

    async def report(what: RankReport) -> None:
        told.append(what)
        if len(told) == 1:
            raise LookupError("a bug")

    order = Order(operation_id="x", command=Pause(mode=PauseMode.KEEP), report=lambda _: None)
    with pytest.raises(OrderFailed) as caught:
        await TwoPhase(engine, order, interrupts(), report, TIMINGS).run()
    assert caught.value.error.effect is FailureEffect.NONE
    assert caught.value.not_rolled_back == ()
    assert [call.phase for call in engine.calls][-2:] == ["rollback", "rollback"]


async def test_an_order_that_is_left_leaves_no_task_behind() -> None:
    engine = MinimalEngine()
    gone = asyncio.Event()

    async def wait(_order: Order, _rank: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    async def report(_: RankReport) -> None:
        return

    engine.script("prepare", wait)
    order = Order(operation_id="x", command=Pause(mode=PauseMode.KEEP), report=lambda _: None)
    running = asyncio.create_task(TwoPhase(engine, order, interrupts(), report, TIMINGS).run())
    while not engine.calls:  # noqa: ASYNC110 (the call itself is what is waited for)
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gone.is_set()
