"""Transactions that the database takes back, cuts short, or that fail when nobody waits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from app.ledger import Ledger, upgrade
from app.ledger.connections import make_blocking_engine
from app.ledger.database import Database, Write
from app.ledger.errors import LedgerUnavailable
from app.ledger.target import target_of
from tests.ledger.samples import with_engine
from tests.ledger.waiting import Signal

pytestmark = pytest.mark.anyio


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    await upgrade(postgres_url)
    database = Database(
        make_blocking_engine(target_of(postgres_url), pool_size=4), on_placed=lambda: None
    )
    try:
        yield database
    finally:
        await database.close()


async def test_a_deadlock_is_settled_without_the_callers(database: Database) -> None:
    both_began = threading.Barrier(2)
    one_ended = Signal()
    tries = 0

    async def make(write: Write) -> None:
        await write.connection.execute(text("CREATE TABLE two (id int, n int)"))
        await write.connection.execute(text("INSERT INTO two VALUES (1, 0), (2, 0)"))

    await database.write(make)
    rise = text("UPDATE two SET n = n + 1 WHERE id = :id")

    async def cross(write: Write, first: int, second: int) -> None:
        nonlocal tries
        tries += 1
        if tries > 2:
            # At once, it could lock its first row again before the other one, who waits for that
            # row, has woken up: a second deadlock.
            one_ended.held()
        await write.connection.execute(rise, {"id": first})
        if tries <= 2:
            both_began.wait()
        await write.connection.execute(rise, {"id": second})

    async def to_the_end(first: int, second: int) -> None:
        await database.write(lambda write: cross(write, first, second))
        one_ended.set()

    await asyncio.gather(to_the_end(1, 2), to_the_end(2, 1))
    assert tries == 3, "one of them was taken back and run again"

    async def sums(write: Write) -> int:
        return int((await write.connection.execute(text("SELECT sum(n) FROM two"))).scalar_one())

    assert await database.write(sums) == 4


async def test_a_statement_that_takes_too_long_is_cut_short(database: Database) -> None:
    async def sleep(write: Write) -> None:
        await write.connection.execute(text("SET LOCAL statement_timeout = '10ms'"))
        await write.connection.execute(text("SELECT pg_sleep(60)"))

    with pytest.raises(LedgerUnavailable):
        await database.write(sleep)
    assert database.pool_in_use() == 0


async def test_a_pool_that_is_used_up_is_said_so(postgres_url: str) -> None:
    await upgrade(postgres_url)
    engine = make_blocking_engine(target_of(postgres_url), pool_size=1, pool_timeout_s=0.01)
    database = Database(engine, on_placed=lambda: None)
    begun, over = Signal(), Signal()

    async def keep(write: Write) -> None:
        begun.set()
        over.held()

    keeper = asyncio.create_task(database.write(keep))
    await begun.told()
    with pytest.raises(LedgerUnavailable):
        await database.write(keep)
    over.set()
    await keeper
    await database.close()


async def test_a_fault_after_the_caller_has_gone_is_logged(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    await with_engine(ledger)
    database = ledger.operations._database
    for error in (None, LedgerUnavailable("a refusal"), RuntimeError("a fault")):
        begun, go_on = Signal(), Signal()

        async def work(
            _write: Write,
            error: Exception | None = error,
            begun: Signal = begun,
            go_on: Signal = go_on,
        ) -> None:
            begun.set()
            go_on.held()
            if error is not None:
                raise error

        task = asyncio.create_task(database.write(work))
        await begun.told()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
    await ledger.close()
    await asyncio.sleep(0)
    faults = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [str(fault.exc_info[1]) for fault in faults if fault.exc_info] == ["a fault"]
