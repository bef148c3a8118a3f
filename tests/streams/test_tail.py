"""The newest events in memory: the same story as the ledger's, from wherever one reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.clock import SystemClock, Uuid7
from app.domain.engine import Dialect, Member, Registration
from app.domain.errors import Unavailable
from app.domain.events import EventType
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Actor, Operation, Progress
from app.domain.transitions import Advanced, Dispatched, Fact, Progressed, advance
from app.http.tail import Tail
from app.ledger.ledger import Ledger
from app.ledger.values import AuditEntry, EventFilter, StoredEvent

pytestmark = pytest.mark.anyio

ACTOR = Actor("https://issuer.example", "ada", "console")


@asynccontextmanager
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    url = f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
    opened = await Ledger.open(url, clock=SystemClock(), migrate=True)
    now = datetime.now(UTC)
    for engine in ("e1", "e2"):
        registration = Registration(
            id=engine,
            dialect=Dialect.OPENENGINE,
            members=(Member(0, "127.0.0.1:1", "127.0.0.1:1"),),
            created_at=now,
            updated_at=now,
        )
        entry = AuditEntry(at=now, action="register_engine", outcome="accepted")
        await opened.engines.register(registration, entry)
    try:
        yield opened
    finally:
        await opened.close()


async def write(opened: Ledger, new_id: Uuid7, engine: str, events: int) -> Operation:
    """An operation with so many events."""
    now = datetime.now(UTC)
    operation = Operation(
        id=new_id(),
        engine_id=engine,
        kind=OperationKind.ABORT_REQUESTS,
        state=OperationState.ACCEPTED,
        request={"all": True},
        actor=ACTOR,
        created_at=now,
    )
    entry = AuditEntry(at=now, action="abort_requests", outcome="accepted")
    await opened.operations.accept(operation, key=None, audit=entry)
    for number in range(events - 1):
        fact: Fact = Dispatched() if number == 0 else Progressed(progress=Progress("p", number))
        step = advance(operation, fact, now)
        assert isinstance(step, Advanced)
        operation = await opened.operations.record(operation, step)
    return operation


async def caught_up(tail: Tail, opened: Ledger) -> None:
    async with asyncio.timeout(20):
        while tail.position < await opened.events.horizon():
            await tail.moved_past(tail.position, 0.05)


async def test_it_tells_what_the_ledger_tells_from_any_position(tmp_path: Path) -> None:
    async with ledger(tmp_path) as opened:
        new_id = Uuid7()
        before = await write(opened, new_id, "e1", 5)
        tail = Tail(opened, kept=6, batch=4)
        await tail.start()
        try:
            one = await write(opened, new_id, "e1", 4)
            await write(opened, new_id, "e2", 9)
            await caught_up(tail, opened)
            filters = (
                EventFilter(),
                EventFilter(engine_ids=frozenset({"e2"})),
                EventFilter(engine_ids=frozenset()),
                EventFilter(operation_id=one.id),
                EventFilter(operation_id=before.id),
                EventFilter(types=frozenset({EventType.PROGRESS})),
                EventFilter(kinds=frozenset({OperationKind.PAUSE})),
                EventFilter(kinds=frozenset({OperationKind.ABORT_REQUESTS})),
            )
            for wanted in filters:
                for limit in (1, 3, 100):
                    for position in range(tail.position + 3):
                        told, _ = await opened.events.after(position, wanted, 500)
                        assert await walk(tail, position, wanted, limit) == list(told)
        finally:
            await tail.stop()


async def walk(tail: Tail, position: int, wanted: EventFilter, limit: int) -> list[StoredEvent]:
    found: list[StoredEvent] = []
    while True:
        events, horizon = await tail.after(position, wanted, limit)
        assert len(events) <= limit
        assert horizon >= position
        found += events
        if not events:
            return found
        position = horizon


async def test_who_waits_is_woken_by_a_commit_and_by_hand(tmp_path: Path) -> None:
    async with ledger(tmp_path) as opened:
        tail = Tail(opened)
        await tail.start()
        try:
            assert await tail.moved_past(tail.position, 0.01) is False
            waiting = asyncio.create_task(tail.moved_past(tail.position, 30))
            await asyncio.sleep(0)
            await write(opened, Uuid7(), "e1", 1)
            assert await waiting is True
            waiting = asyncio.create_task(tail.moved_past(tail.position, 30))
            await asyncio.sleep(0)
            tail.wake()
            assert await waiting is True
        finally:
            await tail.stop()


async def test_it_outlives_whoever_listens_to_it(tmp_path: Path) -> None:
    told: list[int] = []

    async def listen(stored: StoredEvent) -> None:
        told.append(stored.position)
        if len(told) == 1:
            raise Unavailable("not now")
        if len(told) == 2:
            raise RuntimeError("a defect")

    async with ledger(tmp_path) as opened:
        tail = Tail(opened, on_event=listen)
        await tail.start()
        try:
            await write(opened, Uuid7(), "e1", 2)
            await caught_up(tail, opened)
            await write(opened, Uuid7(), "e1", 2)
            await caught_up(tail, opened)
            events, _ = await tail.after(0, EventFilter())
            assert len(events) == 4
        finally:
            await tail.stop()


async def test_an_event_is_spelled_once_for_all_who_hear_it(tmp_path: Path) -> None:
    async with ledger(tmp_path) as opened:
        tail = Tail(opened)
        await tail.start()
        try:
            await write(opened, Uuid7(), "e1", 1)
            await tail.moved_past(0, timeout_s=20.0)
            (stored,), _ = await tail.after(0, EventFilter())
            (other,), _ = await opened.events.after(0, EventFilter())
        finally:
            await tail.stop()
        texts = iter([b"one", b"two", b"three"])
        assert [tail.spelled(stored, lambda _: next(texts)) for _ in range(2)] == [b"one", b"one"]
        # Of the same place, and not the same: what a ledger that was put back has there.
        assert tail.spelled(other, lambda _: next(texts)) == b"two"
        assert tail.spelled(stored, lambda _: next(texts)) == b"three"
