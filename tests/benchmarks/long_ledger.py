"""Whether a ledger stays as fast as it was when it grows a hundredfold."""

from __future__ import annotations

import json
import sqlite3
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg

from app.clock import SystemClock, uuid7
from app.domain.engine import Dialect, Member, Registration
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Actor, Operation
from app.ledger.ledger import Ledger
from app.ledger.values import AuditEntry, EventFilter, KeyClaim, OperationFilter
from tests.benchmarks.figures import Figure, milliseconds

SMALL, LARGE = 10_000, 1_000_000
EVENTS = ("accepted", "dispatched", "progress", "progress")
ENGINES = 50
AIM = 1.5
_ROUNDS = 51
# So many pass every filter of the short ledger too, or none do of either: pages are equally full.
_PAGE = 15
_KINDS = tuple(kind.value for kind in OperationKind if kind is not OperationKind.SHUTDOWN)
_SPAN = timedelta(days=200)
_CUTOFF = timedelta(days=90)
_HOW = (
    f"the same ledger with {LARGE:,} ended operations of five events each beside one with "
    f"{SMALL:,}, over 200 days and {ENGINES} engines, filled in bulk; the middle one of "
    f"{_ROUNDS} calls, in turns on the one and the other; of each list a page of {_PAGE}, once "
    "from its newest and once from its middle."
)
_COLUMNS = {
    "operations": [
        "ordinal",
        "id",
        "engine_id",
        "kind",
        "takes_slot",
        "state",
        "request",
        "issuer",
        "subject",
        "client_id",
        "created_at",
        "sequence",
        "engine_sequence",
        "started_at",
        "ended_at",
        "cancel_requested",
        "warnings",
        "ranks",
    ],
    "events": ["operation_id", "engine_id", "kind", "sequence", "type", "terminal", "time", "data"],
    "audit": ["at", "action", "outcome", "engine_id", "operation_id", "detail"],
}
_ENDS = {"succeeded": "completed", "failed": "failed", "cancelled": "cancelled"}

Rows = Iterator[tuple[Any, ...]]


async def filled(url: str, count: int, *, behind: int = 0) -> Ledger:
    """An open ledger with so many more operations in it. `behind`: not less than it had."""
    ledger = await Ledger.open(url, clock=SystemClock(), migrate=True)
    now = datetime.now(UTC)
    for number in range(0 if behind else ENGINES):
        registration = Registration(
            id=_engine(number), dialect=Dialect.OPENENGINE, members=(Member(0, "h:1", "h:1"),),
            created_at=now, updated_at=now,
        )  # fmt: skip
        entry = AuditEntry(at=now, action="register_engine", outcome="accepted")
        await ledger.engines.register(registration, entry)
    await ledger.close()
    ids = [uuid7() for _ in range(count)]
    tables = {
        "operations": lambda form: _operations(ids, now, form, behind),
        "events": lambda form: _events(ids, now, form),
        "audit": lambda form: _audit(ids, now, form),
    }
    if url.startswith("sqlite"):
        _into_sqlite(Path(url.partition(":///")[2]), tables)
    else:
        _into_postgres(url.replace("+psycopg", ""), tables)
    return await Ledger.open(url, clock=SystemClock())


Call = Callable[[int], Awaitable[object]]


async def calls(ledger: Ledger, count: int) -> dict[str, Call]:
    """What is timed, each given the number of its round."""
    lists = {
        "engine and state": OperationFilter(
            engine_id=_engine(7), states=frozenset({OperationState.FAILED})
        ),
        "two states": OperationFilter(
            states=frozenset({OperationState.FAILED, OperationState.CANCELLED})
        ),
        "kind": OperationFilter(kinds=frozenset({OperationKind.PAUSE})),
        "kind and state": OperationFilter(
            kinds=frozenset({OperationKind.PAUSE}), states=frozenset({OperationState.FAILED})
        ),
        "principal and state": OperationFilter(
            subject="person-3", states=frozenset({OperationState.FAILED})
        ),
        "engine and principal": OperationFilter(engine_id=_engine(7), subject="person-7"),
        "engine, kind and state": OperationFilter(
            engine_id=_engine(7),
            kinds=frozenset({OperationKind.PAUSE}),
            states=frozenset({OperationState.SUCCEEDED}),
        ),
        "moment": OperationFilter(since=datetime.now(UTC) - timedelta(days=2)),
    }
    found: dict[str, Call] = {
        f"page of a list by {name}": lambda n, wanted=wanted: ledger.operations.page(  # type: ignore[misc]
            wanted, count // 2 if n % 2 and wanted.since is None else None, size=_PAGE
        )
        for name, wanted in lists.items()
    }
    some = (await ledger.operations.page(OperationFilter(), count // 3, size=_ROUNDS)).items
    found["replay of an operation's events"] = lambda n: ledger.events.after(
        0, EventFilter(operation_id=some[n].id)
    )
    found["order accepted"] = lambda n: _accept(ledger)
    until = datetime.now(UTC) - _CUTOFF
    found["portion pruned"] = lambda n: ledger.pruning.operations(until, None)
    return found


async def in_turns(*same: Call) -> list[float]:
    """Seconds: the middle one of several calls of each, in turns, so that what the machine does
    besides meets all of them."""
    spent: list[list[float]] = [[] for _ in same]
    for number in range(_ROUNDS):
        for call, times in zip(same, spent, strict=True):
            begun = time.perf_counter()
            await call(number)
            times.append(time.perf_counter() - begun)
    return [statistics.median(times) for times in spent]


async def figures(small_url: str, large_url: str, database: str) -> list[Figure]:
    short = await filled(small_url, SMALL)
    try:
        long = await filled(large_url, LARGE)
        try:
            of_short, of_long = await calls(short, SMALL), await calls(long, LARGE)
            found = {name: await in_turns(of_short[name], of_long[name]) for name in of_short}
        finally:
            await long.close()
    finally:
        await short.close()
    return [
        Figure(
            f"long ledger on {database}: {name}",
            milliseconds(large), f"{milliseconds(small)} (a short ledger)",
            f"{large / small:.2f}", f"≤ {AIM}", met=large <= AIM * small, how=_HOW,
        )
        for name, (small, large) in found.items()
    ]  # fmt: skip


async def _accept(ledger: Ledger) -> None:
    now = datetime.now(UTC)
    operation = Operation(
        id=uuid7(), engine_id=_engine(3), kind=OperationKind.ABORT_REQUESTS,
        state=OperationState.ACCEPTED, request={"all": True},
        actor=Actor("https://issuer", "bench", "bench"), created_at=now,
    )  # fmt: skip
    claim = KeyClaim(operation.id, "f" * 64, now + timedelta(days=1))
    entry = AuditEntry(at=now, action="abort_requests", outcome="accepted")
    await ledger.operations.accept(operation, key=claim, audit=entry)


def _engine(number: int) -> str:
    return f"engine-{number % ENGINES}"


def _state(number: int) -> str:
    spread = number * 7919 % 100
    return "failed" if spread < 2 else "cancelled" if spread < 3 else "succeeded"


def _times(ids: list[str], now: datetime) -> Iterator[tuple[int, str, datetime]]:
    for number, id_ in enumerate(ids):
        yield number, id_, now - _SPAN + _SPAN * (number / len(ids))


def _operations(
    ids: list[str], now: datetime, form: Callable[[datetime], Any], behind: int
) -> Rows:
    for number, id_, at in _times(ids, now):
        yield (
            behind + number + 1, id_, _engine(number), _KINDS[number % len(_KINDS)], True,
            _state(number), json.dumps({"mode": "drain", "new_requests": "hold"}), "https://issuer",
            f"person-{number % 20}", "cli", form(at), len(EVENTS) + 1, 0, form(at), form(at),
            False, "[]", "[]",
        )  # fmt: skip


def _events(ids: list[str], now: datetime, form: Callable[[datetime], Any]) -> Rows:
    data = json.dumps({"phase": "draining", "done": 3, "total": 8, "unit": "requests"})
    for number, id_, at in _times(ids, now):
        kind = _KINDS[number % len(_KINDS)]
        types = (*EVENTS, _ENDS[_state(number)])
        for sequence, type_ in enumerate(types, start=1):
            last = sequence == len(types)
            yield id_, _engine(number), kind, sequence, type_, last, form(at), data


def _audit(ids: list[str], now: datetime, form: Callable[[datetime], Any]) -> Rows:
    for number, id_, at in _times(ids, now):
        yield form(at), _KINDS[number % len(_KINDS)], "accepted", _engine(number), id_, "{}"


def _into_sqlite(path: Path, tables: dict[str, Any]) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cache_size = -400000")
        connection.execute("BEGIN")
        for table, rows in tables.items():
            columns = _COLUMNS[table]
            holes = ", ".join("?" * len(columns))
            statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({holes})"
            connection.executemany(
                statement, rows(lambda at: at.isoformat(timespec="microseconds"))
            )
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


def _into_postgres(url: str, tables: dict[str, Any]) -> None:
    with psycopg.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        for table, rows in tables.items():
            with cursor.copy(f"COPY {table} ({', '.join(_COLUMNS[table])}) FROM STDIN") as copy:
                for row in rows(lambda at: at):
                    copy.write_row(row)
        cursor.execute(
            "SELECT setval('operations_ordinal_seq', (SELECT max(ordinal) FROM operations))"
        )
        cursor.execute("VACUUM ANALYZE")
