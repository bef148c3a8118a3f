"""The promises about streams, each a pure function over a recorded history, as in `guarantees`.

A reader is one who wants to hear everything that matches, over as many connections as it takes.
Where the gateway says a snapshot, a new part of its hearing begins: it knows what is in there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.robustness.history import (
    Closed,
    Connected,
    Delivered,
    History,
    LedgerEvent,
    LedgerOperation,
    LedgerRead,
    Opened,
    Said,
)


@dataclass(slots=True)
class Connection:
    opened: Opened
    status: int | None = None
    heard: list[Delivered | Said] = field(default_factory=list)
    how: str | None = None

    @property
    def events(self) -> list[Delivered]:
        return [each for each in self.heard if isinstance(each, Delivered)]


@dataclass(slots=True)
class Part:
    """What was heard in one go. `start`: the position that it begins behind; `known`: as `Said`."""

    start: int
    known: dict[str, int] = field(default_factory=dict)
    events: list[Delivered] = field(default_factory=list)


@dataclass(slots=True)
class Reader:
    name: str
    connections: list[Connection] = field(default_factory=list)

    @property
    def events(self) -> list[Delivered]:
        return [event for each in self.connections for event in each.events]

    def wants(self, event: LedgerEvent) -> bool:
        first = self.connections[0].opened
        return (first.operation is None or event.operation == first.operation) and (
            first.engines is None or event.engine in first.engines
        )

    def parts(self) -> list[Part]:
        """A reader of everything who begins without a cursor is told first where it stands."""
        found = [Part(self.connections[0].opened.after or 0)]
        for each in (one for connection in self.connections for one in connection.heard):
            if isinstance(each, Delivered):
                found[-1].events.append(each)
            elif each.type == "snapshot" and each.position is not None:
                found.append(Part(each.position, each.known))
        return [part for part in found if part.events]


def readers_of(history: History) -> list[Reader]:
    readers: dict[str, Reader] = {}
    connections: dict[str, Connection] = {}
    for line in history.lines:
        match line.entry:
            case Opened(reader=name, connection=connection) as opened:
                connections[connection] = made = Connection(opened)
                readers.setdefault(name, Reader(name)).connections.append(made)
            case Connected(connection=connection, status=status):
                connections[connection].status = status
            case (Delivered(connection=connection) | Said(connection=connection)) as heard:
                connections[connection].heard.append(heard)
            case Closed(connection=connection, how=how):
                connections[connection].how = how
            case _:
                pass
    return list(readers.values())


def ledger_events(history: History) -> list[LedgerEvent]:
    return sorted(history.all(LedgerEvent), key=lambda event: event.position)


def terminal_once(history: History) -> Iterator[str]:
    """An operation that has ended has one terminal event, its last; nobody hears another."""
    ends: dict[str, list[int]] = {}
    for event in ledger_events(history):
        if event.terminal:
            ends.setdefault(event.operation, []).append(event.sequence)
    for operation in history.all(LedgerOperation):
        wanted = [operation.sequence] if operation.done else []
        found = ends.get(operation.operation, [])
        if found != wanted and not (operation.done and not found and _pruned(history)):
            yield f"operation {operation.operation} has its ends at {found}, and not at {wanted}"
    for reader in readers_of(history):
        over: set[str] = set()
        for told in reader.events:
            if told.operation in over:
                yield f"{reader.name} heard {told.type} of {told.operation} behind its end"
            if told.state is not None:
                over.add(told.operation)


def ordered(history: History) -> Iterator[str]:
    """Positions never go back, over all connections of a reader; nor do an operation's numbers."""
    for reader in readers_of(history):
        yield from _rising(
            reader.name, [(e.position, e.operation, e.sequence) for e in reader.events]
        )
    stored = [(e.position, e.operation, e.sequence) for e in ledger_events(history)]
    yield from _rising("the ledger", stored)


def _rising(whose: str, events: list[tuple[int, str, int]]) -> Iterator[str]:
    last, numbers = 0, dict[str, int]()
    for position, operation, sequence in events:
        if position < last:
            yield f"{whose} has {position} behind {last}"
        if sequence < numbers.get(operation, 0):
            yield f"{whose} has event {sequence} of {operation} behind {numbers[operation]}"
        last, numbers[operation] = position, sequence


def unique(history: History) -> Iterator[str]:
    """Nobody hears anything twice, and a position stands for one event, whoever hears it."""
    places: dict[int, tuple[str, int]] = {}
    everything = [(e.position, e.operation, e.sequence) for e in ledger_events(history)]
    yield from _repeated("the ledger", everything)
    for reader in readers_of(history):
        heard = [(e.position, e.operation, e.sequence) for e in reader.events]
        yield from _repeated(reader.name, heard)
        everything += heard
    for position, operation, sequence in everything:
        if places.setdefault(position, (operation, sequence)) != (operation, sequence):
            yield f"position {position} stands for two events"


def _repeated(whose: str, events: list[tuple[int, str, int]]) -> Iterator[str]:
    positions, numbers = set[int](), set[tuple[str, int]]()
    for position, operation, sequence in events:
        if position in positions:
            yield f"{whose} has position {position} twice"
        if (operation, sequence) in numbers:
            yield f"{whose} has event {sequence} of {operation} twice"
        positions.add(position)
        numbers.add((operation, sequence))


def gap_free(history: History) -> Iterator[str]:
    """An operation's events are heard one by one from the first, or from what was known; and the
    stream of one operation to its end, if it is over."""
    stored = ledger_events(history)
    last = {each.operation: each for each in history.all(LedgerOperation)}
    for reader in readers_of(history):
        for part in reader.parts():
            numbers = dict(part.known)
            if part.start and not part.known:
                numbers = {e.operation: e.sequence for e in stored if e.position <= part.start}
            for event in part.events:
                before = numbers.get(event.operation, 0)
                if event.sequence > before + 1:
                    yield (
                        f"{reader.name} heard event {event.sequence} of {event.operation}"
                        f" behind {before}"
                    )
                numbers[event.operation] = event.sequence
        end = reader.connections[-1]
        wanted = end.opened.operation
        if wanted is None or not _is_over(end):
            continue
        heard = _last_known(reader, wanted)
        if wanted in last and heard != last[wanted].sequence:
            yield f"{reader.name} was told that {wanted} is over behind event {heard}"


def _is_over(connection: Connection) -> bool:
    """The gateway has ended it because the operation has, which it may do in these two ways."""
    if connection.status == 204:
        return True
    said_goodbye = any(isinstance(e, Said) and e.type == "goodbye" for e in connection.heard)
    return connection.how == "ended" and not said_goodbye


def _last_known(reader: Reader, operation: str) -> int:
    last = 0
    for each in (one for connection in reader.connections for one in connection.heard):
        if isinstance(each, Delivered):
            last = each.sequence
        else:
            last = max(last, each.known.get(operation, 0))
    return last


def resumable(history: History) -> Iterator[str]:
    """A reader that comes back with the last position it heard goes on with the very next event."""
    stored = ledger_events(history)
    for reader in readers_of(history):
        last: int | None = reader.connections[0].opened.after
        for number, connection in enumerate(reader.connections):
            after = connection.opened.after
            if after != last:
                yield f"{reader.name} came back with {after}, having heard {last}: its own fault"
            if after is not None and number:
                yield from _goes_on(reader, connection, after, stored)
            for each in connection.heard:
                if each.position is not None:
                    last = each.position


def _goes_on(
    reader: Reader, connection: Connection, after: int, stored: list[LedgerEvent]
) -> Iterator[str]:
    if any(isinstance(each, Said) and each.type == "reset" for each in connection.heard):
        yield f"{reader.name} came back with {after} and was told to begin anew"
        return
    due = next((e for e in stored if e.position > after and reader.wants(e)), None)
    heard = connection.events
    if heard and (due is None or heard[0].position != due.position):
        wanted = None if due is None else due.position
        yield f"{reader.name} came back with {after} and heard {heard[0].position}, not {wanted}"
    if not heard and due is not None and _is_over(connection):
        yield f"{reader.name} came back with {after} and was told that there is nothing more"


def nothing_behind_a_delivered_position(history: History) -> Iterator[str]:
    """Whoever hears a position has heard everything before it that matches; nothing comes up there
    later."""
    stored = ledger_events(history)
    kept_from = _pruned(history)
    for reader in readers_of(history):
        for part in reader.parts():
            heard = {event.position for event in part.events}
            highest = max(heard)
            for event in stored:
                if (
                    max(part.start, kept_from) < event.position < highest
                    and reader.wants(event)
                    and event.sequence > part.known.get(event.operation, 0)
                    and event.position not in heard
                ):
                    yield f"{reader.name} heard {highest} and never {event.position}"


def _pruned(history: History) -> int:
    return max((read.pruned_to for read in history.all(LedgerRead)), default=0)
