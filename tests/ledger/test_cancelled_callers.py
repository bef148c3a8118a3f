"""Callers that go away in the middle: nothing half done, no connection lost. On both databases."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest

from app.domain.errors import ChadburnError
from app.domain.kinds import OperationKind
from app.domain.operation import Progress
from app.domain.transitions import Advanced, Dispatched, Progressed, advance
from app.ledger import Ledger
from app.ledger.errors import LedgerUnavailable
from app.ledger.values import EventFilter, OperationFilter
from tests.ledger.samples import (
    START,
    SetClock,
    accept,
    check_invariants,
    claim,
    entry,
    order,
    record,
    with_engine,
)

pytestmark = pytest.mark.anyio


async def request(ledger: Ledger, number: int) -> None:
    """What one request does to the ledger; each may be the one during which its caller goes."""
    kind = OperationKind.PAUSE if number % 3 == 0 else OperationKind.ABORT_REQUESTS
    try:
        accepted = await ledger.operations.accept(
            order(kind), key=claim(f"k{number % 50}", f"f{number % 50}"), audit=entry()
        )
        now = accepted.operation
        await ledger.events.after(0, EventFilter(), limit=5)
        if accepted.fresh:
            now = await record(ledger, now, Dispatched())
        await ledger.operations.page(OperationFilter(), size=3)
        advanced = advance(now, Progressed(progress=Progress("on")), START)
        if isinstance(advanced, Advanced):
            await ledger.operations.record(now, advanced)
    except ChadburnError as refusal:
        # Refusals are as good as any other end of a request.
        if isinstance(refusal, LedgerUnavailable):
            raise


async def until_idle(ledger: Ledger) -> None:
    """Until every write that was begun has ended, with or without its caller."""
    # SQLite's writers wait for their turn without a connection, and have it in order.
    await ledger.audit.append(entry())
    for _ in range(2_000):
        if ledger.pool_in_use() == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{ledger.pool_in_use()} connections never came back")


async def test_200_cancelled_requests_leave_no_connection_out(ledger: Ledger) -> None:
    await with_engine(ledger)
    chance = random.Random(7)

    async def cancelled(number: int) -> None:
        if number % 2:
            task = asyncio.create_task(request(ledger, number))
            await asyncio.sleep(chance.random() * 0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            # As the web server does it: a scope that cancels again at every turn.
            with anyio.move_on_after(chance.random() * 0.2):
                await request(ledger, number)

    await asyncio.gather(*(cancelled(number) for number in range(200)))
    await until_idle(ledger)
    await check_invariants(ledger)
    # All of the pool is still there.
    await asyncio.gather(*(request(ledger, number) for number in range(20)))
    await until_idle(ledger)
    await check_invariants(ledger)


async def test_a_write_goes_on_without_its_caller(ledger: Ledger) -> None:
    await with_engine(ledger)
    wanted = order()
    task = asyncio.create_task(accept(ledger, wanted, key=claim()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(ledger)
    found = await ledger.operations.get(wanted.id)
    assert found == wanted
    assert len(await ledger.events.of_operation(wanted.id)) == 1


async def test_closing_waits_for_what_is_being_written(ledger_url: str, clock: SetClock) -> None:
    ledger = await Ledger.open(ledger_url, clock=clock, migrate=True)
    await with_engine(ledger)
    wanted = [order(OperationKind.ABORT_REQUESTS) for _ in range(20)]
    tasks = [asyncio.create_task(accept(ledger, each)) for each in wanted]
    await asyncio.sleep(0)
    await ledger.close()
    await ledger.close()
    assert {(await task).id for task in tasks} == {each.id for each in wanted}
    for attempt in (ledger.operations.get("x"), ledger.check(), accept(ledger, order())):
        with pytest.raises(LedgerUnavailable):
            await attempt
    again = await Ledger.open(ledger_url, clock=clock)
    try:
        assert len(await again.operations.open_ones()) == 20
    finally:
        await again.close()
