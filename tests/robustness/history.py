"""What clients, engines and faults did to one ledger, written down as it happens.

A file of JSON lines, in the order in which things were written down. Each is appended by one write
before whoever wrote it goes on, so that of two lines where one thing caused the other the cause
stands first, also over several processes. The guarantees that a history is held against are in
`guarantees`; `python -m tests.robustness.check FILE` checks one again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The first line. `transit_s`: how long what was sent in time may be under way to an engine."""

    seed: int
    about: dict[str, str] = field(default_factory=dict)
    transit_s: float = 1.0


# ---- what clients do ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A client is about to order something. `call`: a name of this one call; `principal`: whose
    keys these are."""

    call: str
    principal: str
    key: str
    engine: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """`operation`, `state`: of a success. `reason`: of a refusal."""

    call: str
    status: int
    operation: str | None = None
    state: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """No answer came: whether the order was taken on is not known."""

    call: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A client is about to read an operation."""

    call: str
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saw:
    """`end`: a digest of all that an ended operation says of its end; None while it is open."""

    call: str
    operation: str
    state: str
    end: str | None = None


# ---- streams ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A reader is about to connect, for the first time or again. `operation`, `engines`: what it
    wants to hear of; None: everything. `after`: the position that its cursor has."""

    reader: str
    connection: str
    operation: str | None = None
    engines: list[str] | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """204: there is nothing to come any more."""

    connection: str
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """`state`: how the operation ended, of a terminal event."""

    connection: str
    position: int
    operation: str
    engine: str
    sequence: int
    type: str
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A control event: snapshot, reset, goodbye. `known`: of operations in a snapshot, the last
    event that it has in it."""

    connection: str
    type: str
    position: int | None = None
    known: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """`how`: `ended` by the gateway, `left` by the reader, or `broken`."""

    connection: str
    how: str


# ---- engines ----


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLife:
    """A new process of the engine: what ran in the one before runs no more."""

    engine: str
    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """An order reached the engine, before any judging. `key`: the gateway's operation id."""

    engine: str
    key: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """`phase`: `begun` when the first rank is given it, `done` when all have done it, `undone`."""

    engine: str
    key: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the engine says of an order: `accepted`, `completed`, `failed`, `cancelled`, or
    `refused` (not taken on). Written before it is sent, whether or not it arrives."""

    engine: str
    key: str
    type: str


# ---- faults ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """`what`: `killed`, `started`, or any other fault. `point`: where in its course."""

    process: str
    what: str
    point: str | None = None


# ---- the ledger, at the end ----


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOperation:
    """`ordinal`: its place in the order of acceptance. `deadline`, `ended`: Unix seconds. `effect`:
    what a failure says that it has left behind. `end`: as `Saw` has it."""

    ordinal: int
    operation: str
    engine: str
    kind: str
    exclusive: bool
    state: str
    done: bool
    sequence: int
    principal: str
    key: str | None = None
    deadline: float | None = None
    ended: float | None = None
    effect: str | None = None
    settled: bool = False
    end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    position: int
    operation: str
    engine: str
    sequence: int
    type: str
    terminal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRead:
    """All of it has been written down. Events up to `pruned_to` are no longer there."""

    pruned_to: int = 0


Entry = (
    Begun
    | Asked
    | Answered
    | Unanswered
    | Looked
    | Saw
    | Opened
    | Connected
    | Delivered
    | Said
    | Closed
    | EngineLife
    | Arrived
    | Carried
    | Told
    | Struck
    | LedgerOperation
    | LedgerEvent
    | LedgerRead
)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Entry.__args__}
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Line:
    """`at`: Unix seconds."""

    number: int
    at: float
    entry: Entry


class History:
    """Raises ValueError for lines that are no history."""

    def __init__(self, lines: tuple[Line, ...]) -> None:
        if not lines or not isinstance(lines[0].entry, Begun):
            raise ValueError("a history says first how it began")
        self.begun = lines[0].entry
        self.lines = lines

    def all(self, kind: type[E]) -> Iterator[E]:
        return (line.entry for line in self.lines if isinstance(line.entry, kind))

    @property
    def is_whole(self) -> bool:
        """Whether the ledger was read at its end."""
        return any(True for _ in self.all(LedgerRead))


def history(*entries: Entry) -> History:
    """Of entries that happened at one second after the other."""
    return History(
        tuple(Line(number, float(number), entry) for number, entry in enumerate(entries, 1))
    )


class Recorder:
    """Appends to the file, which other processes may write at the same time.

    A write costs some microseconds and is never left for later, so that a process that is killed
    has written down all that it had seen.
    """

    def __init__(self, path: Path) -> None:
        """Of a history that has begun; see `begin`."""
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @classmethod
    def begin(cls, path: Path, seed: int, *, transit_s: float = 1.0, **about: str) -> Recorder:
        path.unlink(missing_ok=True)
        recorder = cls(path)
        recorder.write(Begun(seed=seed, about=about, transit_s=transit_s))
        print(f"history: seed {seed}, {path}")
        return recorder

    def write(self, entry: Entry) -> None:
        line = {"at": round(time.time(), 6), "entry": type(entry).__name__, **asdict(entry)}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> History:
        return read(self.path)


def read(path: Path) -> History:
    """Raises ValueError with the number of the line that is none."""
    return History(
        tuple(_line(number, text) for number, text in enumerate(path.read_text().splitlines(), 1))
    )


def _line(number: int, text: str) -> Line:
    try:
        found = json.loads(text)
        at, kind = float(found.pop("at")), _KINDS[found.pop("entry")]
        needed = {each.name for each in fields(kind)}
        if found.keys() != needed:
            raise ValueError(f"{kind.__name__} has {sorted(needed)}")
        return Line(number, at, kind(**found))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"line {number} is no entry: {error!r}") from error
