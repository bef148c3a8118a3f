"""Freeze windows: what the ledger accepts and dispatches in one. On both databases."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from app.domain.errors import EngineFrozen, UnknownEngine
from app.domain.freezes import Freeze
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Progress
from app.domain.transitions import Dispatched, OutcomeUnknown, Progressed, Settled
from app.ledger import Ledger
from app.ledger.values import AuditFilter, EngineFilter
from tests.ledger.samples import (
    ALICE,
    BOB,
    IN_ANY_CASE,
    START,
    SetClock,
    accept,
    check_invariants,
    entry,
    order,
    record,
    with_engine,
)

pytestmark = pytest.mark.anyio

HOUR = timedelta(hours=1)
HOLIDAYS = Freeze(reason="holidays", until=START + HOUR, by=ALICE, since=START)


async def freeze(ledger: Ledger, window: Freeze = HOLIDAYS) -> None:
    await ledger.freezes.put("e1", window, entry("freeze_engine"))


async def thaw(ledger: Ledger) -> bool:
    return await ledger.freezes.lift("e1", entry("thaw_engine"))


async def known(ledger: Ledger) -> Freeze | None:
    engine = await ledger.engines.get("e1")
    assert engine is not None
    (listed,) = (await ledger.engines.page(EngineFilter())).items
    assert listed == engine
    return engine.freeze


async def test_it_is_shown_until_its_time_is_over(ledger: Ledger, clock: SetClock) -> None:
    await with_engine(ledger)
    assert await known(ledger) is None
    await freeze(ledger)
    assert await known(ledger) == HOLIDAYS
    clock.advance(seconds=3599.999)
    assert await known(ledger) == HOLIDAYS
    clock.advance(seconds=0.001)
    assert await known(ledger) is None
    assert not await thaw(ledger)


async def test_another_one_takes_its_place(ledger: Ledger) -> None:
    await with_engine(ledger)
    await freeze(ledger)
    shorter = Freeze(
        reason="audit", until=START + HOUR / 2, by=BOB, since=START + timedelta(seconds=1)
    )
    await freeze(ledger, shorter)
    assert await known(ledger) == shorter
    assert await thaw(ledger)
    assert await known(ledger) is None
    rows = (await ledger.audit.page(AuditFilter())).items
    actions = [row.entry.action for row in reversed(rows)]
    assert actions == ["register_engine", "freeze_engine", "freeze_engine", "thaw_engine"]


async def test_of_an_engine_that_is_not_there(ledger: Ledger) -> None:
    with pytest.raises(UnknownEngine):
        await freeze(ledger)
    with pytest.raises(UnknownEngine):
        await thaw(ledger)
    assert (await ledger.audit.page(AuditFilter())).items == ()


async def test_nothing_is_accepted_that_does_not_override_it(
    ledger: Ledger, clock: SetClock
) -> None:
    await with_engine(ledger)
    await freeze(ledger)
    for kind in (OperationKind.PAUSE, OperationKind.ABORT_REQUESTS):
        for queueing in (None, IN_ANY_CASE):
            with pytest.raises(
                EngineFrozen, match=r"until 2026-03-01T13:00:00\.123456Z: holidays"
            ) as frozen:
                await accept(ledger, order(kind), queueing=queueing)
            assert frozen.value.retry_after_s == 3601
    overriding = await accept(ledger, order(override_freeze=True))
    assert await ledger.operations.get(overriding.id) == overriding
    await record(ledger, overriding, Dispatched())
    clock.advance(hours=1)
    await accept(ledger, order(OperationKind.ABORT_REQUESTS))
    await check_invariants(ledger)


async def test_what_was_accepted_before_is_not_dispatched(ledger: Ledger, clock: SetClock) -> None:
    await with_engine(ledger)
    waiting = await accept(ledger, order())
    running = await record(
        ledger, await accept(ledger, order(OperationKind.ABORT_REQUESTS)), Dispatched()
    )
    await freeze(ledger)
    with pytest.raises(EngineFrozen):
        await record(ledger, waiting, Dispatched())
    assert await ledger.operations.get(waiting.id) == waiting
    # What runs is heard on.
    await record(ledger, running, Progressed(progress=Progress("aborting")))
    clock.advance(hours=1)
    assert (await record(ledger, waiting, Dispatched())).state is OperationState.RUNNING


async def test_once_it_is_put_nothing_slips_through(ledger: Ledger, ledger_url: str) -> None:
    """Orders that race with the freeze are accepted before it or refused by it; the positions of
    the audit are in that order too."""
    await with_engine(ledger)
    second = ledger
    if not ledger_url.startswith("sqlite"):
        second = await Ledger.open(ledger_url, clock=SetClock())
    try:
        for number in range(15):
            kind = OperationKind.ABORT_REQUESTS
            orders = [
                accept(
                    (ledger, second)[turn % 2],
                    order(kind),
                    audit=entry("abort_requests", note=f"{number}"),
                )
                for turn in range(6)
            ]
            orders.insert(number % 6, freeze(second))  # type: ignore[arg-type]
            results = await asyncio.gather(*orders, return_exceptions=True)
            refused = [each for each in results if isinstance(each, BaseException)]
            assert all(isinstance(each, EngineFrozen) for each in refused), refused
            with pytest.raises(EngineFrozen):
                await accept(ledger, order(kind))
            rows = (await ledger.audit.page(AuditFilter(), size=20)).items
            last = [row.entry.action for row in rows]
            behind = last[: last.index("freeze_engine")]
            assert behind == [], "accepted behind the freeze"
            await thaw(ledger)
    finally:
        if second is not ledger:
            await second.close()


async def test_a_settled_end_needs_no_thaw(ledger: Ledger) -> None:
    await with_engine(ledger)
    now = await record(ledger, await accept(ledger, order()), Dispatched())
    now = await record(ledger, now, OutcomeUnknown(message="no reply"))
    await freeze(ledger)
    ended = await record(
        ledger, now, Settled(end=OperationState.FAILED, by="alice", reason="looked")
    )
    assert ended.done
