"""Engines, operations and entries for tests, and what must always be true of a ledger."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from app.clock import uuid7
from app.domain.engine import Dialect, Engine, Member, Registration
from app.domain.events import TERMINAL_EVENTS, EventType
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Actor, Operation
from app.domain.queueing import Queueing
from app.domain.transitions import Advanced, Fact, advance
from app.ledger import Ledger
from app.ledger.values import (
    AuditEntry,
    EventFilter,
    KeyClaim,
    OperationFilter,
    StoredEvent,
)

START = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
ALICE = Actor("https://issuer.test", "alice", "cli")
BOB = Actor("https://issuer.test", "bob", "cli")
IN_ANY_CASE = Queueing(16, in_any_case=True)


class SetClock:
    def __init__(self, at: datetime = START) -> None:
        self.at = at

    def now(self) -> datetime:
        return self.at

    def advance(self, **by: float) -> None:
        self.at += timedelta(**by)


def registration(engine_id: str = "e1", **changes: Any) -> Registration:
    values: dict[str, Any] = {
        "id": engine_id,
        "dialect": Dialect.OPENENGINE,
        "members": (Member(0, "127.0.0.1:7001", "127.0.0.1:7000"),),
        "created_at": START,
        "updated_at": START,
    }
    return Registration(**values | changes)


def entry(action: str = "pause", outcome: str = "accepted", **values: Any) -> AuditEntry:
    fields: dict[str, Any] = {"at": START, "action": action, "outcome": outcome}
    return AuditEntry(**fields | values)


async def with_engine(ledger: Ledger, engine_id: str = "e1") -> Engine:
    return await ledger.engines.register(registration(engine_id), entry("register_engine"))


def order(
    kind: OperationKind = OperationKind.PAUSE,
    engine_id: str = "e1",
    *,
    actor: Actor = ALICE,
    **values: Any,
) -> Operation:
    """A new operation, as it is before the ledger has it."""
    fields: dict[str, Any] = {
        "id": uuid7(),
        "engine_id": engine_id,
        "kind": kind,
        "state": OperationState.ACCEPTED,
        "request": {"mode": "drain", "new_requests": "hold"},
        "actor": actor,
        "created_at": START,
    }
    return Operation(**fields | values)


def claim(key: str = "k1", fingerprint: str = "f1", expires_at: datetime = START) -> KeyClaim:
    return KeyClaim(key, fingerprint, expires_at)


def step(operation: Operation, fact: Fact, at: datetime = START) -> Advanced:
    advanced = advance(operation, fact, at)
    assert isinstance(advanced, Advanced), advanced
    return advanced


async def accept(ledger: Ledger, operation: Operation, **options: Any) -> Operation:
    settings: dict[str, Any] = {"key": None, "audit": entry()}
    accepted = await ledger.operations.accept(operation, **settings | options)
    assert accepted.fresh
    return accepted.operation


async def record(ledger: Ledger, operation: Operation, fact: Fact, **options: Any) -> Operation:
    return await ledger.operations.record(operation, step(operation, fact), **options)


async def all_operations(ledger: Ledger) -> list[Operation]:
    """Oldest first, read page by page."""
    found: list[Operation] = []
    before = None
    while True:
        page = await ledger.operations.page(OperationFilter(), before, size=200)
        found += page.items
        if page.next is None:
            return found[::-1]
        assert isinstance(page.next, int)
        before = page.next


async def all_events(ledger: Ledger) -> list[StoredEvent]:
    """Of everything there is, read as a stream would read it."""
    found: list[StoredEvent] = []
    position = 0
    while True:
        some, horizon = await ledger.events.after(position, EventFilter(), limit=100)
        found += some
        if horizon == position:
            return found
        position = horizon


async def check_invariants(ledger: Ledger) -> list[Operation]:
    """What holds after any history whatever; gives all operations."""
    operations = await all_operations(ledger)
    events = await all_events(ledger)

    positions = [stored.position for stored in events]
    assert positions == sorted(set(positions)), "positions rise strictly"

    of: dict[str, list[StoredEvent]] = {operation.id: [] for operation in operations}
    for stored in events:
        of[stored.event.operation_id].append(stored)
    for operation in operations:
        own = of[operation.id]
        # In the order of positions, hence also: positions agree with the sequence.
        assert [stored.event.sequence for stored in own] == list(range(1, operation.sequence + 1))
        assert tuple(own) == await ledger.events.of_operation(operation.id)
        ends = [stored.event.type in TERMINAL_EVENTS for stored in own]
        assert ends == [False] * (len(own) - 1) + [operation.state.terminal]

    open_ones = [operation for operation in operations if not operation.state.terminal]
    assert list(await ledger.operations.open_ones()) == open_ones
    holders = sorted(
        (operation.engine_id, operation.id)
        for operation in open_ones
        if operation.kind.exclusive and operation.state is not OperationState.QUEUED
    )
    assert len({engine_id for engine_id, _ in holders}) == len(holders), "one slot per engine"
    for engine_id, group in itertools.groupby(holders, key=lambda holder: holder[0]):
        engine = await ledger.engines.get(engine_id)
        assert engine is not None
        assert [engine.running_operation] == [operation_id for _, operation_id in group]

    for engine_id in {operation.engine_id for operation in operations}:
        exclusive = [o for o in operations if o.engine_id == engine_id and o.kind.exclusive]
        waiting = [o for o in exclusive if o.state is OperationState.QUEUED]
        assert (await ledger.operations.line(engine_id)).waiting == tuple(o.id for o in waiting)
        assert [o.queue_position for o in waiting] == list(range(1, len(waiting) + 1))
        sent = [
            stored.position
            for operation in exclusive
            for stored in of[operation.id]
            if stored.event.type == EventType.DISPATCHED and "again" not in stored.event.data
        ]
        assert sent == sorted(sent), "orders are sent in the order in which they were taken on"
    assert not any(o.queue_position for o in operations if o.state is not OperationState.QUEUED)
    return operations
