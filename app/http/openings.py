"""Where a reader of events begins: what it is told first, and the position it goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.domain.engine import Engine
from app.domain.events import ControlEvent
from app.domain.operation import Operation
from app.http.cursors import Cursor
from app.http.documents.engine import EngineDocument
from app.http.documents.operation import OperationDocument
from app.http.rooms import Rooms
from app.ledger.values import EngineFilter, EventFilter

_ENGINES_AT_ONCE = 500
_TRIES = 3
TOO_OLD = "cursor_too_old"


@dataclass(frozen=True, slots=True)
class Said:
    """A control event. `position` None: it is no place to resume from."""

    type: ControlEvent
    data: dict[str, Any]
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """`first` is said at once, then come the events behind `position`.

    `sequences`: of operations in a snapshot, the last event that it has in it already.
    `over`: there will be no more, whatever happens. `sequence`: of one operation's stream, the
    number that its next event has, where that is known.
    """

    position: int
    first: tuple[Said, ...] = ()
    sequences: dict[str, int] | None = None
    over: bool = False
    sequence: int | None = None


async def open_operation(rooms: Rooms, operation: Operation, cursor: Cursor | None) -> Opening:
    """From its first event; from behind a cursor; or, where the cursor leads nowhere or the first
    event is no longer there, from a snapshot of the operation."""
    if cursor is None:
        begun = await rooms.ledger.events.of_operation(operation.id, 0, 1)
        if begun and begun[0].event.sequence == 1:
            return Opening(begun[0].position - 1, sequence=1)
        return await reset_operation(rooms, operation, "history_pruned")
    # It has all its events as long as it is there, so no cursor of this ledger is too old for it.
    why = await _why_not_ours(rooms, cursor)
    if why is None and cursor.position is not None:
        return Opening(cursor.position, over=await _is_past_end(rooms, operation, cursor.position))
    return await reset_operation(rooms, operation, why)


async def reset_operation(rooms: Rooms, operation: Operation, why: str | None) -> Opening:
    """From a snapshot, and why."""
    position = await rooms.ledger.events.horizon()
    now = await rooms.ledger.operations.get(operation.id) or operation
    data = {"position": position, "operation": _operation(now)}
    return Opening(
        position,
        (_reset(why), Said(ControlEvent.SNAPSHOT, data, position)),
        {now.id: now.sequence},
        over=now.done,
        sequence=now.sequence + 1,
    )


async def open_all(rooms: Rooms, wanted: EventFilter, cursor: Cursor | None) -> Opening:
    """From behind a cursor; else from a snapshot of the engines and the open operations."""
    if cursor is None:
        return await _snapshot(rooms, wanted, ())
    why = await _why_reset(rooms, cursor)
    if why is None and cursor.position is not None:
        return Opening(cursor.position)
    return await reset_all(rooms, wanted, why)


async def reset_all(rooms: Rooms, wanted: EventFilter, why: str | None) -> Opening:
    """From a snapshot, and why."""
    return await _snapshot(rooms, wanted, (_reset(why),))


async def _snapshot(rooms: Rooms, wanted: EventFilter, before: tuple[Said, ...]) -> Opening:
    """The state at a position. It is read again while events come in between; after a few tries
    the last reading stands, and `sequences` keeps apart what it has in it already."""
    events = rooms.ledger.events
    for _ in range(_TRIES):
        position = await events.horizon()
        engines = await _engines(rooms, wanted)
        seen = {engine.id for engine in engines}
        operations = [
            operation
            for operation in await rooms.ledger.operations.open_ones()
            if (wanted.engine_ids is None or operation.engine_id in wanted.engine_ids)
            and (wanted.sight.unlimited or operation.engine_id in seen)
            and (not wanted.kinds or operation.kind in wanted.kinds)
        ]
        if await events.horizon() == position:
            break
    data = {
        "position": position,
        "engines": [EngineDocument.of(engine).model_dump(mode="json") for engine in engines],
        "operations": [_operation(operation) for operation in operations],
    }
    return Opening(
        position,
        (*before, Said(ControlEvent.SNAPSHOT, data, position)),
        {operation.id: operation.sequence for operation in operations},
    )


async def _engines(rooms: Rooms, wanted: EventFilter) -> list[Engine]:
    if wanted.engine_ids is not None:
        named = [await rooms.ledger.engines.get(i) for i in sorted(wanted.engine_ids)]
        return [
            engine
            for engine in named
            if engine is not None and wanted.sight.sees(engine.id, engine.registration.labels)
        ]
    found: list[Engine] = []
    after: str | None = None
    while True:
        among = EngineFilter(sight=wanted.sight)
        page = await rooms.ledger.engines.page(among, after, _ENGINES_AT_ONCE)
        found.extend(page.items)
        if not isinstance(page.next, str):
            return found
        after = page.next


async def _why_reset(rooms: Rooms, cursor: Cursor) -> str | None:
    """Why a cursor can't be resumed from; None: it can."""
    why = await _why_not_ours(rooms, cursor)
    if why is None and cursor.position is not None:
        return TOO_OLD if cursor.position < await rooms.ledger.events.oldest() else None
    return why


async def _why_not_ours(rooms: Rooms, cursor: Cursor) -> str | None:
    # Not by the horizon: an operation's own stream may be ahead of it, for as long as another
    # writer has not committed.
    if cursor.position is not None and await rooms.ledger.events.given_out(cursor.position):
        return None
    return "cursor_not_ours"


async def _is_past_end(rooms: Rooms, operation: Operation, position: int) -> bool:
    if not operation.done:
        return False
    last = await rooms.ledger.events.of_operation(operation.id, operation.sequence - 1, 1)
    # Where it is gone, so is all that was before it, and the cursor is newer than that.
    return not last or last[0].position <= position


def _reset(why: str | None) -> Said:
    return Said(ControlEvent.RESET, {"reason": why})


def _operation(operation: Operation) -> dict[str, Any]:
    return OperationDocument.of(operation).model_dump(mode="json")
