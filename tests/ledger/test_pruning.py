"""What is pruned and what stays, on both databases; and what readers are told of it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import text

from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Operation, OperationWarning
from app.domain.transitions import Completed, Dispatched, Warned
from app.ledger import Ledger
from app.ledger import pruning as bounds
from app.ledger.database import Write
from app.ledger.errors import HistoryPruned
from app.ledger.pruning import Place, Pruned, preview, prune
from app.ledger.sealing import seal_all
from app.ledger.values import AuditFilter, EventFilter
from app.operations.retention import Retention
from tests.ledger.samples import (
    ALICE,
    START,
    SetClock,
    accept,
    all_events,
    all_operations,
    claim,
    entry,
    order,
    record,
    step,
    with_engine,
)

pytestmark = pytest.mark.anyio

ABORT = OperationKind.ABORT_REQUESTS  # any number may be open at once
MONTH = Retention(timedelta(days=30), timedelta(days=3000))


@pytest.fixture
async def registered(ledger: Ledger) -> Ledger:
    await with_engine(ledger)
    return ledger


async def ended(ledger: Ledger, clock: SetClock, **options: object) -> Operation:
    """Three events, and over at the clock's time."""
    taken = await accept(ledger, order(ABORT, created_at=clock.now()), **options)
    return await end(ledger, clock, taken)


async def end(ledger: Ledger, clock: SetClock, taken: Operation) -> Operation:
    now = await record(ledger, taken, Dispatched())
    return await ledger.operations.record(now, step(now, Completed(result={}), clock.now()))


async def pruned(ledger: Ledger, clock: SetClock, retention: Retention = MONTH) -> Pruned:
    done = await prune(ledger.pruning, retention.cutoffs(clock), pause_s=0)
    assert not done.elsewhere
    return done.pruned


async def sealed(ledger: Ledger) -> None:
    await seal_all(ledger.duties, ledger.sealing, "a test")


async def test_what_has_been_over_for_long_enough_goes_and_nothing_else(
    registered: Ledger, ledger_url: str, clock: SetClock
) -> None:
    open_one = await accept(registered, order(ABORT))
    old = await ended(registered, clock)
    clock.advance(days=1)
    young = await ended(registered, clock)
    clock.at = START + timedelta(days=30) - timedelta(microseconds=1)
    assert await pruned(registered, clock) == Pruned()
    clock.at = START + timedelta(days=30)
    expected = Pruned(operations=1, events=3)
    cutoffs = MONTH.cutoffs(clock)
    assert await preview(ledger_url, clock.now(), cutoffs) == expected
    assert [one.id for one in await all_operations(registered)] == [open_one.id, old.id, young.id]
    assert await pruned(registered, clock) == expected
    assert await preview(ledger_url, clock.now(), cutoffs) == Pruned()
    assert await all_operations(registered) == [open_one, young]
    assert await registered.operations.get(old.id) is None
    assert await registered.events.of_operation(old.id) == ()

    clock.advance(days=400)
    await pruned(registered, clock)
    assert await all_operations(registered) == [open_one], "however old"
    assert len(await registered.events.of_operation(open_one.id)) == 1


async def test_a_cursor_is_good_from_the_last_pruned_place_on(
    registered: Ledger, clock: SetClock
) -> None:
    """One operation runs for months, and its events lie among those of others that are pruned."""
    long_one = await accept(registered, order(ABORT))
    await ended(registered, clock)
    long_one = await record(registered, long_one, Dispatched())
    await ended(registered, clock)
    warning = Warned(warning=OperationWarning("SLOW", "still at it"))
    clock.advance(days=40)
    events = await all_events(registered)
    highest = events[-1].position
    assert await registered.events.oldest() == 0
    assert (await pruned(registered, clock)).operations == 2
    assert await registered.events.oldest() == highest

    for cursor in (0, highest - 1):
        with pytest.raises(HistoryPruned):
            await registered.events.after(cursor, EventFilter())
    assert await registered.events.after(highest, EventFilter()) == ((), highest)
    assert await registered.events.horizon() == highest, "not that of the last event that is left"
    own = EventFilter(operation_id=long_one.id)
    found, _ = await registered.events.after(0, own)
    assert [stored.event.sequence for stored in found] == [1, 2]

    long_one = await record(registered, long_one, warning)
    ((stored,), _) = await registered.events.after(highest, EventFilter())
    assert (stored.event.operation_id, stored.event.sequence) == (long_one.id, 3)


async def test_an_operation_stays_as_long_as_a_key_names_it(
    registered: Ledger, clock: SetClock
) -> None:
    """In any order of keys and ages: keys are looked at first, and of those that are held more
    than one portion is passed over."""
    promised = START + timedelta(days=90)
    count = bounds.OPERATIONS_AT_ONCE + 1
    for number in range(count):
        await ended(registered, clock, key=claim(f"k{number}", expires_at=promised))
    clock.advance(seconds=1)
    unkeyed = await ended(registered, clock)
    clock.advance(days=80)
    assert await pruned(registered, clock) == Pruned(operations=1, events=3)
    assert await registered.operations.get(unkeyed.id) is None
    replayed = await registered.operations.replay(ALICE, "k0", "f1")
    assert replayed is not None
    assert replayed.state is OperationState.SUCCEEDED

    clock.at = promised
    assert await pruned(registered, clock) == Pruned(count, 3 * count, count)
    assert await registered.operations.replay(ALICE, "k0", "f1") is None
    assert await all_operations(registered) == []
    assert await registered.events.horizon() == await registered.events.oldest()


async def test_a_portion_is_bounded_and_one_big_operation_goes_by_itself(
    registered: Ledger, clock: SetClock
) -> None:
    small = await ended(registered, clock)
    clock.advance(seconds=1)
    big = await accept(registered, order(ABORT))

    async def grow(write: Write) -> None:
        """As if the engine had reported that often."""
        await write.connection.execute(
            text(
                "INSERT INTO events (operation_id, engine_id, kind, sequence, type, terminal, time,"
                " data) WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE"
                " i < :most) SELECT operation_id, engine_id, kind, i, 'progress', terminal, time,"
                " data FROM events, n WHERE operation_id = :id AND sequence = 1"
            ),
            {"id": big.id, "most": bounds.EVENTS_AT_ONCE + 50},
        )
        await write.connection.execute(
            text("UPDATE operations SET sequence = :most WHERE id = :id"),
            {"id": big.id, "most": bounds.EVENTS_AT_ONCE + 50},
        )

    await registered.events._database.write(grow)
    grown = await registered.operations.get(big.id)
    assert grown is not None
    await end(registered, clock, grown)
    clock.advance(seconds=1)
    last = await ended(registered, clock)

    clock.advance(days=30)
    until = MONTH.cutoffs(clock).operations
    portions, place = [], None
    while True:
        portion = await registered.pruning.operations(until, place)
        assert portion is not None
        portions.append((portion.pruned.operations, portion.pruned.events))
        place = portion.place
        if not portion.more:
            break
    assert portions == [(1, 3), (1, bounds.EVENTS_AT_ONCE + 52), (1, 3)]
    assert place == Place(last.ended_at or START, 3)
    assert small.ended_at != last.ended_at


async def test_the_audit_has_an_age_of_its_own_and_goes_from_its_beginning(
    registered: Ledger, clock: SetClock
) -> None:
    ages = Retention(timedelta(days=30), timedelta(days=60))
    gone = await ended(registered, clock)
    await sealed(registered)
    await registered.audit.append(entry("pause", "refused", at=START + timedelta(days=2)))
    # A gateway whose clock is behind: older, and after a younger one.
    await registered.audit.append(entry("resume", "refused", at=START + timedelta(days=1)))
    await sealed(registered)
    clock.advance(days=30)
    assert await pruned(registered, clock, ages) == Pruned(operations=1, events=3)
    told = (await registered.audit.page(AuditFilter())).items
    assert len(told) == 4, "the operation is gone, and who ordered it is still known"
    assert await registered.operations.get(gone.id) is None
    clock.at = START + timedelta(days=61)
    assert await pruned(registered, clock, ages) == Pruned(audit=2)
    clock.at = START + timedelta(days=62)
    assert await pruned(registered, clock, ages) == Pruned(audit=2)
    assert (await registered.audit.page(AuditFilter())).items == ()


async def test_pruning_beside_writers_and_readers(registered: Ledger, clock: SetClock) -> None:
    """Whoever reads everything either gets every event behind its cursor or is told to begin anew,
    and nobody who writes is refused."""
    for _ in range(150):
        await ended(registered, clock)
    clock.advance(days=31)
    over = asyncio.Event()

    async def write() -> None:
        while not over.is_set():
            await ended(registered, clock)

    async def read() -> None:
        position, seen = 0, set[int]()
        while not (over.is_set() and position >= await registered.events.horizon()):
            try:
                found, horizon = await registered.events.after(position, EventFilter(), 7)
            except HistoryPruned:
                position = await registered.events.horizon()
                continue
            assert [s.position for s in found] == sorted({s.position for s in found} - seen)
            seen |= {s.position for s in found}
            position = max(horizon, position)

    writers = [asyncio.create_task(write()) for _ in range(2)]
    readers = [asyncio.create_task(read()) for _ in range(2)]
    done = await pruned(registered, clock)
    over.set()
    await asyncio.gather(*writers)
    await asyncio.gather(*readers)
    assert done == Pruned(operations=150, events=450)
    await check_left(registered)


async def check_left(ledger: Ledger) -> None:
    for operation in await all_operations(ledger):
        own = await ledger.events.of_operation(operation.id)
        assert [stored.event.sequence for stored in own] == [1, 2, 3]


async def test_one_process_prunes_at_a_time(postgres_url: str) -> None:
    clock = SetClock()
    one = await Ledger.open(postgres_url, clock=clock, migrate=True)
    other = await Ledger.open(postgres_url, clock=clock)
    try:
        await with_engine(one)
        for _ in range(3):
            await ended(one, clock)
        clock.advance(days=30)
        with one.events._database._engine.begin() as held:
            held.execute(text("SELECT pg_advisory_xact_lock(1128414562, 2)"))
            given_up = await prune(other.pruning, MONTH.cutoffs(clock), pause_s=0)
            assert (given_up.elsewhere, given_up.pruned) == (True, Pruned())
        runs = await asyncio.gather(
            *(
                prune(each.pruning, MONTH.cutoffs(clock), pause_s=0, tries=1000)
                for each in (one, other)
            )
        )
        assert runs[0].pruned + runs[1].pruned == Pruned(operations=3, events=9)
    finally:
        await one.close()
        await other.close()


async def test_nothing_is_taken_behind_an_open_writer(postgres_url: str) -> None:
    """A writer that has its place and has not committed may yet become visible there. Until it
    has ended, nothing above it is pruned, so `pruned_to` can't pass it."""
    clock = SetClock()
    ledger = await Ledger.open(postgres_url, clock=clock, migrate=True)
    try:
        await with_engine(ledger)
        await ended(ledger, clock)
        slow = ledger.events._database._engine
        with slow.begin() as writer:
            last = "(SELECT last_value FROM events_position_seq)"
            lock = f"SELECT pg_advisory_xact_lock_shared((17218::bigint << 48) + {last})"
            writer.execute(text(lock))
            behind = await ended(ledger, clock)
            clock.advance(days=30)
            assert (await pruned(ledger, clock)).operations == 1
            assert await ledger.operations.get(behind.id) is not None
        assert (await pruned(ledger, clock)).operations == 1
    finally:
        await ledger.close()
