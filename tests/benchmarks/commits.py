"""Orders accepted by the ledger per second, beside plain commits of the same database."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg

from app.clock import SystemClock, uuid7
from app.domain.engine import Dialect, Member, Registration
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Actor, Operation
from app.ledger.ledger import Ledger
from app.ledger.values import AuditEntry, KeyClaim
from tests.benchmarks.figures import Figure, per_second

COUNT = 400
AT_ONCE = 8
PAYLOAD = "x" * 200
_HOW = (
    f"{COUNT} acceptances through `Ledger.operations.accept`, each with its event, key and audit "
    "row, and as durable as in service; beside it one row a commit on the same database, one after "
    "the other."
)
ACTOR = Actor("https://issuer", "bench", "bench")


async def accepted(url: str) -> tuple[float, float]:
    """Seconds for COUNT acceptances one after the other, and AT_ONCE at a time."""
    ledger = await Ledger.open(url, clock=SystemClock(), migrate=True)
    try:
        now = datetime.now(UTC)
        registration = Registration(
            id="bench", dialect=Dialect.OPENENGINE, members=(Member(0, "h:1", "h:1"),),
            created_at=now, updated_at=now,
        )  # fmt: skip
        await ledger.engines.register(registration, _audit(None))

        async def accept() -> None:
            operation = _operation()
            claim = KeyClaim(operation.id, "f" * 64, now + timedelta(days=1))
            await ledger.operations.accept(operation, key=claim, audit=_audit(operation))

        async def worker(count: int) -> None:
            for _ in range(count):
                await accept()

        begun = time.perf_counter()
        await worker(COUNT)
        alone = time.perf_counter() - begun
        begun = time.perf_counter()
        await asyncio.gather(*(worker(COUNT // AT_ONCE) for _ in range(AT_ONCE)))
        return alone, time.perf_counter() - begun
    finally:
        await ledger.close()


def raw_sqlite(path: Path) -> float:
    """The same durability, one row a commit."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE raw (id INTEGER PRIMARY KEY, data TEXT)")
        begun = time.perf_counter()
        for _ in range(COUNT):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO raw (data) VALUES (?)", (PAYLOAD,))
            connection.execute("COMMIT")
        return time.perf_counter() - begun
    finally:
        connection.close()


def raw_postgres(url: str) -> float:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("CREATE TABLE raw (id bigserial PRIMARY KEY, data text)")
        begun = time.perf_counter()
        for _ in range(COUNT):
            with connection.transaction():
                connection.execute("INSERT INTO raw (data) VALUES (%s)", (PAYLOAD,))
        return time.perf_counter() - begun


def figures(database: str, ours: tuple[float, float], raw: float) -> list[Figure]:
    alone, together = ours
    baseline = f"{per_second(COUNT, raw)} (one row a commit)"
    return [
        Figure(
            f"ledger on {database}: orders accepted, one at a time",
            per_second(COUNT, alone), baseline, f"{raw / alone:.2f}", how=_HOW,
        ),
        Figure(
            f"ledger on {database}: orders accepted, {AT_ONCE} at a time",
            per_second(COUNT, together), baseline, f"{raw / together:.2f}", how=_HOW,
        ),
    ]  # fmt: skip


def _operation() -> Operation:
    return Operation(
        id=uuid7(),
        engine_id="bench",
        kind=OperationKind.ABORT_REQUESTS,  # any number may be open at once
        state=OperationState.ACCEPTED,
        request={"all": True},
        actor=ACTOR,
        created_at=datetime.now(UTC),
    )


def _audit(operation: Operation | None) -> AuditEntry:
    return AuditEntry(
        at=datetime.now(UTC),
        action="abort_requests" if operation else "register_engine",
        outcome="accepted",
        actor=ACTOR,
        engine_id="bench",
        operation_id=operation.id if operation else None,
    )
