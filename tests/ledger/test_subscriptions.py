"""Being told of new events: in this process, from other processes, and in spite of losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psycopg
import pytest

from app.domain.errors import EngineBusy
from app.domain.operation import Progress
from app.domain.transitions import Dispatched, Progressed
from app.ledger import Ledger
from app.ledger.wakes import Wakes
from tests.ledger.samples import SetClock, accept, entry, order, record, with_engine

pytestmark = pytest.mark.anyio

LONG_S = 60.0
"""Never waited for: a test that needs it has failed."""


async def test_a_commit_wakes_every_subscriber(ledger: Ledger) -> None:
    await with_engine(ledger)
    with ledger.events.subscribe() as one, ledger.events.subscribe() as two:
        waiting = [asyncio.create_task(each.changed(LONG_S)) for each in (one, two)]
        await asyncio.sleep(0)
        await accept(ledger, order())
        assert await asyncio.gather(*waiting) == [True, True]


async def test_a_commit_between_subscribing_and_waiting_is_not_missed(ledger: Ledger) -> None:
    await with_engine(ledger)
    with ledger.events.subscribe() as subscription:
        now = await accept(ledger, order())
        await record(ledger, now, Dispatched())
        assert await subscription.changed(LONG_S)


async def test_on_sqlite_nobody_is_woken_for_nothing(tmp_path: Path, clock: SetClock) -> None:
    """On PostgreSQL one may be, for instance when the listening connection has been made anew."""
    ledger = await Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock, migrate=True)
    try:
        await with_engine(ledger)
        with ledger.events.subscribe() as subscription:
            await record(ledger, await accept(ledger, order()), Dispatched())
            assert await subscription.changed(LONG_S)
            assert not await subscription.changed(0.0), "two commits, one look"
            with pytest.raises(EngineBusy):
                await accept(ledger, order())
            await ledger.audit.append(entry())
            assert not await subscription.changed(0.0)
    finally:
        await ledger.close()


async def test_subscriptions_hold_no_connection(ledger_url: str, clock: SetClock) -> None:
    ledger = await Ledger.open(ledger_url, clock=clock, migrate=True, pool_size=1)
    try:
        await with_engine(ledger)

        async def wait() -> bool:
            with ledger.events.subscribe() as subscription:
                return await subscription.changed(LONG_S)

        waiting = [asyncio.create_task(wait()) for _ in range(20)]
        await asyncio.sleep(0)
        assert ledger.pool_in_use() == 0
        await accept(ledger, order())
        assert all(await asyncio.gather(*waiting))
        assert ledger.pool_in_use() == 0
    finally:
        await ledger.close()


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    wakes = Wakes()
    with wakes.subscribe() as subscription:
        task = asyncio.create_task(subscription.changed(LONG_S))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert wakes.wanted
        wakes.wake()
        assert await subscription.changed(0.0)
    assert not wakes.wanted


# ---- from other processes, which here are other ledgers on the same PostgreSQL ----

Opener = Callable[[float], Awaitable[Ledger]]


@pytest.fixture
async def opened(postgres_url: str, clock: SetClock) -> AsyncIterator[Opener]:
    ledgers: list[Ledger] = []

    async def open_one(poll_interval_s: float) -> Ledger:
        ledger = await Ledger.open(
            postgres_url, clock=clock, migrate=True, poll_interval_s=poll_interval_s
        )
        ledgers.append(ledger)
        return ledger

    yield open_one
    for ledger in ledgers:
        await ledger.close()


async def listeners(postgres_url: str) -> list[int]:
    async with await psycopg.AsyncConnection.connect(postgres_url.replace("+psycopg", "")) as it:
        rows = await it.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE 'LISTEN%' ORDER BY pid"
        )
        return [pid for (pid,) in await rows.fetchall()]


async def until_listening(postgres_url: str, count: int, gone: frozenset[int]) -> None:
    for _ in range(1_000):
        if len(set(await listeners(postgres_url)) - gone) == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nobody listens")


async def test_a_commit_elsewhere_is_announced(opened: Opener, postgres_url: str) -> None:
    here, there = await opened(LONG_S), await opened(LONG_S)
    await until_listening(postgres_url, 2, frozenset())
    await with_engine(there)
    now = await accept(there, order())
    with here.events.subscribe() as subscription:
        while await subscription.changed(0.5):
            pass  # what was announced before
        now = await record(there, now, Dispatched())
        assert await subscription.changed(LONG_S)
        for number in range(20):
            now = await record(there, now, Progressed(progress=Progress("on", number)))
        assert await subscription.changed(LONG_S)


async def test_a_lost_listener_comes_back(opened: Opener, postgres_url: str) -> None:
    here, there = await opened(LONG_S), await opened(LONG_S)
    await until_listening(postgres_url, 2, frozenset())
    await with_engine(there)
    now = await accept(there, order())
    lost = await listeners(postgres_url)
    async with await psycopg.AsyncConnection.connect(postgres_url.replace("+psycopg", "")) as it:
        await it.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE"
            " datname = current_database() AND application_name = 'chadburn'"
        )
    with here.events.subscribe() as subscription:
        # It may have missed something while it was away, and says so.
        assert await subscription.changed(LONG_S)
        await until_listening(postgres_url, 2, frozenset(lost))
        while await subscription.changed(0.5):
            pass
        # The pooled connections were lost too, and are made again.
        now = await record(there, now, Dispatched())
        assert await subscription.changed(LONG_S)


async def test_what_nobody_announced_is_found_by_looking(opened: Opener, postgres_url: str) -> None:
    """As from a gateway that died between its commit and its announcement."""
    here = await opened(0.05)
    await with_engine(here)
    now = await accept(here, order())
    url = postgres_url.replace("+psycopg", "")
    with here.events.subscribe() as subscription:
        while await subscription.changed(0.5):
            pass
        async with await psycopg.AsyncConnection.connect(url) as silent:
            await silent.execute(
                "INSERT INTO events (operation_id, engine_id, kind, sequence, type, terminal,"
                " time, data) VALUES (%s, 'e1', 'pause', 2, 'progress', false, now(), '{}')",
                (now.id,),
            )
        assert await subscription.changed(LONG_S)


async def test_the_end_of_a_writer_that_came_to_nothing_is_found_too(
    opened: Opener, postgres_url: str
) -> None:
    """Readers may have been stopped behind its place."""
    here = await opened(0.05)
    await with_engine(here)
    url = postgres_url.replace("+psycopg", "")
    with here.events.subscribe() as subscription:
        async with await psycopg.AsyncConnection.connect(url) as silent:
            await silent.execute(
                f"SELECT pg_advisory_xact_lock_shared({0x4342 << 48} + last_value),"
                " nextval('events_position_seq') FROM events_position_seq"
            )
            while await subscription.changed(0.5):
                pass
            await silent.rollback()
        assert await subscription.changed(LONG_S)
