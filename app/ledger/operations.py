"""Operations: taken on once, and changed only by conditional writes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Row, Select, bindparam, delete, func, select, update

from app.clock import Clock
from app.domain.errors import TooManyOpenOperations, UnknownEngine
from app.domain.idempotency import replay_of
from app.domain.kinds import OperationState
from app.domain.operation import Actor, Operation
from app.domain.queueing import Line, Queueing
from app.domain.transitions import Advanced, Queued, accepted_event, advance
from app.ledger import audit as auditing
from app.ledger import freezes, keys, payloads
from app.ledger import leases as leasing
from app.ledger.constraints import violations
from app.ledger.database import Database, Statements, Write
from app.ledger.errors import Superseded
from app.ledger.listing import page_of_operations
from app.ledger.paging import page_of
from app.ledger.positions import append
from app.ledger.rows import changing_values, operation_of, operation_values
from app.ledger.sights import seen_ids
from app.ledger.tables import (
    SLOT_STATES,
    engines,
    is_open,
    operations,
    queue_position,
    stages,
)
from app.ledger.values import Accepted, AuditEntry, KeyClaim, Lease, OpenMark, OperationFilter, Page

_AT_ONCE = 500
_UNSENT = frozenset({OperationState.ACCEPTED, OperationState.QUEUED})


class Operations:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def accept(
        self,
        operation: Operation,
        *,
        key: KeyClaim | None,
        audit: AuditEntry,
        queueing: Queueing | None = None,
        payload: bytes | None = None,
        most_open: int | None = None,
    ) -> Accepted:
        """Take on a new operation (`accepted`, sequence 1): its row, its key, its payload, its
        first event and the audit entry, in one transaction. `queueing`: where the engine is busy
        it goes on to `queued` in the same one, and does not take the engine's slot. Operations
        that exclude no others are never queued; `most_open`: with one of them so many of the
        engine's operations may be open.

        A key used before for the same request gives that operation, `fresh` False, and writes
        nothing; so does losing a race for the key. A refusal leaves the key unused.

        Raises IdempotencyKeyReused (the key stands for another request), EngineBusy naming what
        is in the way, QueueFull, TooManyOpenOperations, UnknownEngine, EngineFrozen unless the
        operation overrides it.
        """
        return await self._database.write(
            lambda write: self._accept(write, operation, key, audit, queueing, payload, most_open)
        )

    async def _accept(
        self,
        write: Write,
        operation: Operation,
        key: KeyClaim | None,
        audit: AuditEntry,
        queueing: Queueing | None,
        payload: bytes | None,
        most_open: int | None,
    ) -> Accepted:
        now = self._clock.now()
        if key is not None:
            known = await keys.known(write.connection, operation.actor, key.key, now)
            earlier = replay_of(known, key.fingerprint)
            if earlier is not None:
                return Accepted(await existing(write.connection, earlier), fresh=False)
            # Before anything is refused: from here on nobody else has this key, so whoever is
            # found in the slot is another order, and not this one's twin.
            with violations():
                await keys.claim(write, operation.actor, key, operation.id, now)
        exclusive = operation.kind.exclusive
        await _require_engine(write, operation.engine_id, one_by_one=exclusive)
        if not operation.override_freeze:
            await freezes.require_thawed(write, operation.engine_id, now)
        position = None
        if exclusive:
            position = (await _line(write.connection, operation.engine_id)).enter(queueing)
        elif most_open is not None:
            await _check_room(write.connection, operation.engine_id, most_open)

        taken, events = operation, [accepted_event(operation)]
        if position is not None:
            step = advance(operation, Queued(position=position), operation.created_at)
            assert isinstance(step, Advanced), "a new operation may be queued"
            assert step.event is not None
            taken, events = step.operation, [*events, step.event]

        with violations():
            await write.connection.execute(_TAKE, operation_values(taken))
            if payload is not None:
                await payloads.keep(write, taken.id, payload)
            for event in events:
                await append(write, event, operation.kind)
        await auditing.write_entry(write, audit)
        return Accepted(taken, fresh=True)

    async def replay(self, actor: Actor, key: str, fingerprint: str) -> Operation | None:
        """What a key used before stands for; None: not used, or its retention is over.

        Raises IdempotencyKeyReused.
        """

        async def look(connection: Statements) -> Operation | None:
            known = await keys.known(connection, actor, key, self._clock.now())
            earlier = replay_of(known, fingerprint)
            return None if earlier is None else await existing(connection, earlier)

        return await self._database.read(look)

    async def get(self, operation_id: str) -> Operation | None:
        async def look(connection: Statements) -> Operation | None:
            return await _find(connection, operation_id)

        return await self._database.read(look)

    async def page(
        self, wanted: OperationFilter, before: int | None = None, size: int = 50
    ) -> Page[Operation]:
        """Newest first, in order of acceptance; `next` is a number for `before`."""
        postgres = self._database.postgres

        async def look(connection: Statements) -> Page[Operation]:
            seen = await seen_ids(connection, wanted.sight, wanted.engine_id, postgres=postgres)
            if seen == ():
                return Page((), None)
            query = page_of_operations(_query(), wanted, before, size, seen)
            rows = (await connection.execute(query)).all()
            return page_of(rows, size, operation_of, lambda row: row.ordinal)

        return await self._database.read(look)

    async def record(
        self,
        before: Operation,
        advanced: Advanced,
        *,
        lease: Lease | None = None,
        audit: AuditEntry | None = None,
        asked: AuditEntry | None = None,
    ) -> Operation:
        """Write one step: the operation as `advanced` has it, its event if there is one, and the
        audit entries, in one transaction. Gives `advanced.operation`. `asked`: the call that the
        step is the answer to; it stands in the audit before `audit`.

        Raises Superseded when the stored operation is not at the state, sequence and engine
        sequence of `before`, or when the lease has gone to another holder or was released;
        EngineBusy when a queued operation would run beside another exclusive one, or before one
        that waits longer; EngineFrozen when one that does not override it would be dispatched in
        a freeze.
        """
        if before.state.terminal or before.id != advanced.operation.id:
            raise ValueError("a step leads on from an open operation to the same one")
        return await self._database.write(
            lambda write: self._record(write, before, advanced, lease, (asked, audit))
        )

    async def _record(
        self,
        write: Write,
        before: Operation,
        advanced: Advanced,
        lease: Lease | None,
        entries: tuple[AuditEntry | None, ...],
    ) -> Operation:
        after = advanced.operation
        if lease is not None and not await leasing.hold(write, lease):
            raise Superseded("the lease of the engine is gone", operation_id=before.id)
        if after.state is OperationState.RUNNING and before.state in _UNSENT:
            await self._require_thawed(write, before)
        if before.kind.exclusive and before.state not in SLOT_STATES and after.state in SLOT_STATES:
            (await _line(write.connection, before.engine_id)).check_turn(before.id)
        with violations():
            await write_step(write, before, advanced)
        for entry in entries:
            if entry is not None:
                await auditing.write_entry(write, entry)
        return after

    async def _require_thawed(self, write: Write, operation: Operation) -> None:
        if not operation.override_freeze:
            # Before its own row: whoever freezes the engine holds on to no operation.
            await _require_engine(write, operation.engine_id)
            await freezes.require_thawed(write, operation.engine_id, self._clock.now())

    async def open_ones(self, engine_id: str | None = None) -> tuple[Operation, ...]:
        """All that have not ended, oldest first."""
        query = _query().where(is_open).order_by(operations.c.ordinal)
        if engine_id is not None:
            query = query.where(operations.c.engine_id == engine_id)

        async def look(connection: Statements) -> tuple[Operation, ...]:
            return tuple(operation_of(row) for row in await connection.execute(query))

        return await self._database.read(look)

    async def open_marks(self) -> tuple[OpenMark, ...]:
        """Of all that have not ended, oldest first, what tells whether they have gone on."""

        async def look(connection: Statements) -> tuple[OpenMark, ...]:
            rows = await connection.execute(_OPEN_MARKS)
            return tuple(
                OpenMark(row.id, row.engine_id, OperationState(row.state), row.sequence)
                for row in rows
            )

        return await self._database.read(look)

    async def several(self, operation_ids: Collection[str]) -> tuple[Operation, ...]:
        """Those of them that there are, oldest first."""
        ids = sorted(operation_ids)

        async def look(connection: Statements) -> tuple[Operation, ...]:
            found: list[Row[Any]] = []
            for start in range(0, len(ids), _AT_ONCE):
                some = {"ids": ids[start : start + _AT_ONCE]}
                found += await connection.execute(_SEVERAL, some)
            return tuple(map(operation_of, sorted(found, key=lambda row: row.ordinal)))

        return await self._database.read(look)

    async def line(self, engine_id: str) -> Line:
        """Who has the engine's slot, and who waits for it."""
        return await self._database.read(lambda connection: _line(connection, engine_id))


def _query() -> Select[Any]:
    return select(operations, queue_position.label("queue_position"))


# Made once: to build and to compare a statement costs SQLAlchemy more than to run it.
_ONE = _query().where(operations.c.id == bindparam("operation"))
_TAKE = operations.insert()
_SEVERAL = _query().where(operations.c.id.in_(bindparam("ids", expanding=True)))
_OPEN_MARKS = (
    select(operations.c.id, operations.c.engine_id, operations.c.state, operations.c.sequence)
    .where(is_open)
    .order_by(operations.c.ordinal)
)
_COUNT_OPEN = (
    select(func.count())
    .select_from(operations)
    .where(is_open, operations.c.engine_id == bindparam("engine"))
)
_STEP = update(operations).where(
    operations.c.id == bindparam("of_id"),
    operations.c.state == bindparam("of_state"),
    operations.c.sequence == bindparam("of_sequence"),
    operations.c.engine_sequence == bindparam("of_engine_sequence"),
)
_DROP_STAGES = delete(stages).where(stages.c.operation_id == bindparam("operation"))
# In one statement: what moves on between two could be seen in neither place.
_LINE = (
    select(operations.c.id, operations.c.state)
    .where(operations.c.engine_id == bindparam("engine"), operations.c.takes_slot, is_open)
    .order_by(operations.c.ordinal)
)
_ENGINE = select(engines.c.id).where(
    engines.c.id == bindparam("engine"), engines.c.removed_at.is_(None)
)
# The weaker kinds of locks, which neither readings of the engine (by their foreign key) nor orders
# that go beside others have to wait for.
_ENGINE_SHARED = _ENGINE.with_for_update(read=True, key_share=True)
_ENGINE_ALONE = _ENGINE.with_for_update(key_share=True)


async def _find(connection: Statements, operation_id: str) -> Operation | None:
    row = (await connection.execute(_ONE, {"operation": operation_id})).one_or_none()
    return None if row is None else operation_of(row)


async def _check_room(connection: Statements, engine_id: str, most_open: int) -> None:
    """Each open operation is driven by a task and looked for by every gateway each second. Several
    that come at once on PostgreSQL may be a few more: this bounds memory, and promises nothing."""
    found = await connection.execute(_COUNT_OPEN, {"engine": engine_id})
    if found.scalar_one() >= most_open:
        raise TooManyOpenOperations(
            "as many operations of this engine are open as may be", retry_after_s=5
        )


async def write_step(write: Write, before: Operation, advanced: Advanced) -> None:
    """The operation as `advanced` has it, with its event. Raises Superseded."""
    after = advanced.operation
    step = changing_values(after) | {
        "of_id": before.id,
        "of_state": before.state.value,
        "of_sequence": before.sequence,
        "of_engine_sequence": before.engine_sequence,
    }
    if (await write.connection.execute(_STEP, step)).rowcount == 0:
        raise Superseded("the operation has gone on in the meantime", operation_id=before.id)
    if advanced.event is not None:
        await append(write, advanced.event, before.kind)
    if after.done:
        # What came with it, and with its further calls, is of no more use to anybody.
        await payloads.forget(write, after.id)
        await write.connection.execute(_DROP_STAGES, {"operation": after.id})


async def existing(connection: Statements, operation_id: str) -> Operation:
    """One that a foreign key names."""
    found = await _find(connection, operation_id)
    assert found is not None
    return found


async def _line(connection: Statements, engine_id: str) -> Line:
    holder, waiting = None, []
    for row in await connection.execute(_LINE, {"engine": engine_id}):
        if row.state == OperationState.QUEUED.value:
            waiting.append(row.id)
        else:
            holder = row.id
    return Line(holder, tuple(waiting))


async def _require_engine(write: Write, engine_id: str, *, one_by_one: bool = False) -> None:
    """Raises UnknownEngine. Until the commit the engine cannot be removed: removing locks the
    same row for itself, and then looks for open operations.

    `one_by_one`: nor can another order be taken on that wants to be alone with this one. The
    numbers of orders that wait then rise in the order in which they become visible, so whoever
    finds one of them first in the line need not fear that an earlier one is still to appear; and
    no two take the last place.
    """
    query = _ENGINE_ALONE if one_by_one else _ENGINE_SHARED
    if (await write.connection.execute(query, {"engine": engine_id})).one_or_none() is None:
        raise UnknownEngine("there is no such engine")
