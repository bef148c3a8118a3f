"""Nothing becomes visible behind what was delivered, however slow a commit is.

PostgreSQL alone: SQLite has one writer at a time. The writers here are the ledger's own, held up
in the middle of their transactions, or statements by hand where something has to go wrong.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from app.domain.kinds import OperationKind
from app.domain.operation import Operation, Progress
from app.domain.transitions import Dispatched, Progressed
from app.ledger import Ledger
from app.ledger.connections import make_blocking_engine
from app.ledger.database import Database, Write
from app.ledger.positions import append, last_taken, settled
from app.ledger.rows import changing_values
from app.ledger.tables import MAX_POSITION, operations
from app.ledger.target import target_of
from app.ledger.values import EventFilter, StoredEvent
from tests.ledger.samples import (
    SetClock,
    accept,
    check_invariants,
    order,
    record,
    step,
    with_engine,
)
from tests.ledger.waiting import Signal

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ledger(postgres_url: str, clock: SetClock) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(postgres_url, clock=clock, migrate=True)
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture
async def database(postgres_url: str, ledger: Ledger) -> AsyncIterator[Database]:
    """Transactions of another gateway, which tells nobody when it has ended."""
    database = Database(
        make_blocking_engine(target_of(postgres_url), pool_size=10), on_placed=lambda: None
    )
    try:
        yield database
    finally:
        await database.close()


class Rolled(Exception):
    """How a test makes a transaction come to nothing."""


class SlowWriter:
    """Takes one position for a step of an operation, and then does not commit until told."""

    def __init__(self, database: Database, now: Operation) -> None:
        self._database = database
        self._now = now
        self._go_on = Signal()
        self._placed = Signal()
        self.roll_back = False
        self.position = 0
        self.task = asyncio.create_task(self._database.write(self._write))

    async def _write(self, write: Write) -> Operation:
        advanced = step(self._now, Progressed(progress=Progress("slowly")))
        assert advanced.event is not None
        after = advanced.operation
        change = operations.update().where(operations.c.id == after.id)
        await write.connection.execute(change.values(changing_values(after)))
        self.position = await append(write, advanced.event, after.kind)
        self._placed.set()
        self._go_on.held()
        if self.roll_back:
            raise Rolled
        return after

    async def placed(self) -> int:
        await self._placed.told()
        return self.position

    async def end(self) -> None:
        self._go_on.set()
        try:
            await self.task
        except Rolled:
            assert self.roll_back


@asynccontextmanager
async def slow_writer(database: Database, now: Operation) -> AsyncIterator[SlowWriter]:
    writer = SlowWriter(database, now)
    try:
        yield writer
    finally:
        writer.roll_back = writer.roll_back or not writer.task.done()
        await writer.end()


async def running(ledger: Ledger, engine_id: str) -> Operation:
    await with_engine(ledger, engine_id)
    return await record(ledger, await accept(ledger, order(engine_id=engine_id)), Dispatched())


async def positions_after(ledger: Ledger, position: int) -> tuple[list[int], int]:
    found, horizon = await ledger.events.after(position, EventFilter())
    return [stored.position for stored in found], horizon


async def test_a_slow_commit_holds_readers_back_and_is_not_missed(
    ledger: Ledger, database: Database
) -> None:
    slow, fast = await running(ledger, "slow"), await running(ledger, "fast")
    before = await ledger.events.horizon()
    async with slow_writer(database, slow) as writer:
        place = await writer.placed()
        # Others are not held up: they commit behind it, and are not seen yet.
        for number in range(3):
            fast = await record(ledger, fast, Progressed(progress=Progress("on", number)))
        assert await positions_after(ledger, before) == ([], before)
        assert await ledger.events.horizon() == before
        await writer.end()
    assert await positions_after(ledger, before) == (
        [place, place + 1, place + 2, place + 3],
        place + 3,
    )
    await check_invariants(ledger)


async def test_what_is_rolled_back_leaves_a_gap_and_no_one_waiting(
    ledger: Ledger, database: Database
) -> None:
    slow, fast = await running(ledger, "slow"), await running(ledger, "fast")
    before = await ledger.events.horizon()
    async with slow_writer(database, slow) as writer:
        place = await writer.placed()
        await record(ledger, fast, Progressed(progress=Progress("on")))
        assert await positions_after(ledger, before) == ([], before)
        writer.roll_back = True
        await writer.end()
    assert await positions_after(ledger, before) == ([place + 1], place + 1)
    await check_invariants(ledger)


async def test_the_horizon_is_always_the_place_of_a_committed_event(
    ledger: Ledger, database: Database
) -> None:
    """A number that was rolled back may be given out again after a crash of the database."""
    slow = await running(ledger, "slow")
    before = await ledger.events.horizon()
    async with slow_writer(database, slow) as writer:
        place = await writer.placed()
        writer.roll_back = True
        await writer.end()
    assert await ledger.events.horizon() == before
    assert await positions_after(ledger, 0) == (list(range(1, before + 1)), before)
    assert await database.read(lambda connection: last_taken(connection, True)) == place
    assert await ledger.events.given_out(place)
    assert not await ledger.events.given_out(place + 1)


async def test_the_oldest_of_several_writers_decides(ledger: Ledger, database: Database) -> None:
    first, second, third = [await running(ledger, name) for name in ("a", "b", "c")]
    before = await ledger.events.horizon()
    async with (
        slow_writer(database, first) as one,
        slow_writer(database, second) as two,
    ):
        places = sorted([await one.placed(), await two.placed()])
        await record(ledger, third, Progressed(progress=Progress("on")))
        older, younger = (one, two) if one.position < two.position else (two, one)
        await younger.end()
        assert await positions_after(ledger, before) == ([], before)
        await older.end()
    assert (await positions_after(ledger, before))[0] == [*places, places[-1] + 1]


async def test_a_writer_that_dies_lets_its_readers_go(ledger: Ledger, postgres_url: str) -> None:
    now = await running(ledger, "e1")
    before = await ledger.events.horizon()
    url = postgres_url.replace("+psycopg", "")
    dead = await psycopg.AsyncConnection.connect(url)
    await dead.execute(
        f"SELECT pg_advisory_xact_lock_shared({0x4342 << 48} + last_value),"
        " nextval('events_position_seq') FROM events_position_seq"
    )
    await record(ledger, now, Progressed(progress=Progress("on")))
    assert await positions_after(ledger, before) == ([], before)
    await dead.close()
    found: list[int] = []
    for _ in range(1_000):
        found, _horizon = await positions_after(ledger, before)
        if found:
            break
        await asyncio.sleep(0.01)
    assert found == [before + 2]


async def test_other_advisory_locks_hold_no_one_back(
    ledger: Ledger, postgres_url: str, postgres_server: dict[str, Any]
) -> None:
    """Locks of other kinds in this database, and of our kind in another database."""
    now = await running(ledger, "e1")
    url = postgres_url.replace("+psycopg", "")
    async with (
        await psycopg.AsyncConnection.connect(url) as here,
        await psycopg.AsyncConnection.connect(**postgres_server, dbname="postgres") as elsewhere,
    ):
        await here.execute("SELECT pg_advisory_xact_lock_shared(1)")
        await here.execute("SELECT pg_advisory_xact_lock(7, 7)")
        await here.execute(f"SELECT pg_advisory_xact_lock({0x4342 << 16}, 0)")
        await elsewhere.execute(f"SELECT pg_advisory_xact_lock_shared({0x4342 << 48})")
        now = await record(ledger, now, Progressed(progress=Progress("on")))
        last = (await ledger.events.of_operation(now.id))[-1].position
        assert await ledger.events.horizon() == last


async def test_a_lock_spells_positions_beyond_32_bits(ledger: Ledger, database: Database) -> None:
    now, other = await running(ledger, "e1"), await running(ledger, "e2")
    for high in (2**31 - 2, 2**32 - 2, 2**40, MAX_POSITION - 10):

        async def jump(write: Write, to: int = high) -> None:
            await write.connection.execute(
                text("SELECT setval('events_position_seq', :to)"), {"to": to}
            )

        await database.write(jump)
        now = await record(ledger, now, Progressed(progress=Progress("on")))
        before = await ledger.events.horizon()
        assert before == high + 1
        async with slow_writer(database, now) as writer:
            assert await writer.placed() == high + 2
            other = await record(ledger, other, Progressed(progress=Progress("on")))
            assert await ledger.events.horizon() == before
            await writer.end()
        found = await ledger.operations.get(now.id)
        assert found is not None
        now = found
        assert await ledger.events.horizon() == high + 3
    await check_invariants(ledger)


async def test_readers_among_many_slow_writers_miss_and_repeat_nothing(
    ledger: Ledger, database: Database, postgres_url: str, clock: SetClock
) -> None:
    """8 writers, some of them slow and some rolling back; 3 readers, each with a position."""
    chance = random.Random(20260301)
    second = await Ledger.open(postgres_url, clock=clock)
    await with_engine(ledger)
    over = asyncio.Event()

    async def write(gateway: Ledger) -> None:
        now = await accept(gateway, order(OperationKind.ABORT_REQUESTS))
        now = await record(gateway, now, Dispatched())
        for number in range(16):
            if chance.random() < 0.3:
                async with slow_writer(database, now) as writer:
                    await writer.placed()
                    await asyncio.sleep(chance.random() * 0.1)
                    writer.roll_back = chance.random() < 0.3
                    await writer.end()
                found = await gateway.operations.get(now.id)
                assert found is not None
                now = found
            else:
                now = await record(gateway, now, Progressed(progress=Progress("on", number)))

    async def read(gateway: Ledger) -> list[StoredEvent]:
        found: list[StoredEvent] = []
        position = 0
        while True:
            last_round = over.is_set()
            some, horizon = await gateway.events.after(position, EventFilter(), limit=20)
            assert all(position < stored.position <= horizon for stored in some)
            found += some
            if horizon == position:
                if last_round:
                    return found
                await asyncio.sleep(0.001)
            position = horizon

    try:
        readers = [asyncio.create_task(read(gateway)) for gateway in (ledger, second, ledger)]
        await asyncio.gather(*(write(gateway) for gateway in (ledger, second) * 4))
        over.set()
        streams = await asyncio.gather(*readers)
    finally:
        await second.close()

    everything, _ = await ledger.events.after(0, EventFilter(), limit=100_000)
    assert len(everything) > 100
    for stream in streams:
        assert tuple(stream) == everything
    await check_invariants(ledger)


async def test_settled_positions_are_read_in_later_snapshots(database: Database) -> None:
    """The argument needs READ COMMITTED, whatever the server's default is."""

    async def level(write: Write) -> str:
        await settled(write.connection, True)
        shown = await write.connection.execute(text("SHOW transaction_isolation"))
        return str(shown.scalar_one())

    assert await database.write(level) == "read committed"
