"""The engine's own durable store: one SQLite file with operations, events, keys and counters.

Synchronous; used from one thread. Every write is one IMMEDIATE transaction, and what must never
be wrong is a constraint of the file too. The file is locked for the life of the process, so that
two engines can't count on the same revision.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from app.domain.idempotency import KeyRecord
from app.domain.kinds import FailureEffect
from app.domain.operation import Operation, OperationError, OperationEvent
from app.domain.transitions import Advanced, Failed, Rejected, advance
from app.enginekit.records import (
    EVERYTHING,
    Counters,
    FurtherKey,
    Record,
    event_from,
    event_row,
    operation_from,
    operation_text,
)

FILE_NAME = "operations.sqlite3"
_VERSION = 2

_SCHEMA = """
CREATE TABLE engine (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    identity TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    pause_epoch INTEGER NOT NULL,
    release_epoch INTEGER NOT NULL
);
CREATE TRIGGER counters_never_go_back BEFORE UPDATE ON engine
WHEN NEW.revision < OLD.revision OR NEW.pause_epoch < OLD.pause_epoch
    OR NEW.release_epoch < OLD.release_epoch OR NEW.identity <> OLD.identity
BEGIN SELECT RAISE(ABORT, 'counters never go back'); END;

CREATE TABLE operations (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    idempotency_key TEXT NOT NULL UNIQUE,
    fingerprint TEXT NOT NULL,
    accepted_revision INTEGER NOT NULL,
    exclusive INTEGER NOT NULL,
    state TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    ended_at TEXT,
    document TEXT NOT NULL
);
CREATE UNIQUE INDEX one_open_exclusive ON operations (exclusive)
    WHERE exclusive = 1 AND ended_at IS NULL;
CREATE INDEX operations_ended ON operations (ended_at);
CREATE TRIGGER ends_never_change BEFORE UPDATE ON operations WHEN OLD.ended_at IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'an ended operation never changes'); END;

CREATE TABLE events (
    operation_id TEXT NOT NULL REFERENCES operations (id) ON DELETE CASCADE,
    sequence INTEGER NOT NULL,
    type TEXT NOT NULL,
    time TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (operation_id, sequence)
) WITHOUT ROWID;
CREATE UNIQUE INDEX one_end ON events (operation_id)
    WHERE type IN ('completed', 'failed', 'cancelled');
"""

# Version 2: an operation that several calls order has a key for each of them.
_FURTHER_KEYS = """
CREATE TABLE further_keys (
    idempotency_key TEXT PRIMARY KEY,
    operation_id TEXT NOT NULL REFERENCES operations (id) ON DELETE CASCADE,
    fingerprint TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX further_keys_of_operation ON further_keys (operation_id);
CREATE TRIGGER further_keys_are_new BEFORE INSERT ON further_keys
WHEN EXISTS (SELECT 1 FROM operations WHERE idempotency_key = NEW.idempotency_key)
BEGIN SELECT RAISE(ABORT, 'the key has an operation'); END;
CREATE TRIGGER first_keys_are_new BEFORE INSERT ON operations
WHEN EXISTS (SELECT 1 FROM further_keys WHERE idempotency_key = NEW.idempotency_key)
BEGIN SELECT RAISE(ABORT, 'the key has an operation'); END;
"""


class StoreInUse(Exception):
    """Another process has the store open."""


class StoreUnreadable(Exception):
    """The file is damaged, cannot be written, or was written by a later version."""


class StoreFull(Exception):
    """Nothing may be evicted: all that is kept is open, or within its retention."""


class Superseded(Exception):
    """The operation is no longer as the writer knew it."""


class OperationStore:
    def __init__(self, db: sqlite3.Connection, identity: str) -> None:
        self._db = db
        self.identity = identity

    @classmethod
    def open(cls, folder: Path, *, new_identity: str) -> OperationStore:
        """`new_identity` is taken when the store is empty. Raises StoreInUse, StoreUnreadable,
        OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        db = sqlite3.connect(folder / FILE_NAME, timeout=0, isolation_level=None)
        try:
            return cls(db, _prepare(db, new_identity))
        except sqlite3.OperationalError as error:
            db.close()
            if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise StoreInUse(str(folder)) from error
            raise StoreUnreadable(str(error)) from error
        except sqlite3.DatabaseError as error:
            db.close()
            raise StoreUnreadable(str(error)) from error
        except BaseException:
            db.close()
            raise

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Cursor]:
        cursor = self._db.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")

    def begin_life(self, instance_id: str, at: datetime) -> Counters:
        """A new process takes over: every counter rises, and what an earlier one left open ends,
        with its effect stated as unknown."""
        with self._writing() as cursor:
            counters = self._counters(cursor).after(EVERYTHING)
            cursor.execute("UPDATE engine SET instance_id = ?", (instance_id,))
            self._set(cursor, counters)
            for record in self._records(cursor, "ended_at IS NULL", ()):
                end = Failed(error=_RESTARTED, revision=counters.revision)
                advanced = advance(record.operation, end, at)
                if isinstance(advanced, Rejected):
                    raise Superseded(record.operation.id)
                self._write(cursor, record.operation, advanced)
        return counters

    def accept(
        self,
        record: Record,
        accepted: OperationEvent,
        *,
        keep: int,
        evictable_before: datetime,
    ) -> None:
        """Raises StoreFull when `keep` operations are held and none of them ended before
        `evictable_before`."""
        op = record.operation
        with self._writing() as cursor:
            if self._count(cursor) >= keep:
                cursor.execute(
                    "DELETE FROM operations WHERE ended_at IS NOT NULL AND ended_at < ?",
                    (evictable_before.isoformat(),),
                )
                if self._count(cursor) >= keep:
                    raise StoreFull
            cursor.execute(
                "INSERT INTO operations (id, idempotency_key, fingerprint, accepted_revision,"
                " exclusive, state, sequence, document) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    op.id,
                    record.key,
                    record.fingerprint,
                    record.accepted_revision,
                    op.kind.exclusive,
                    op.state.value,
                    op.sequence,
                    operation_text(op),
                ),
            )
            self._append(cursor, accepted)

    def record(
        self,
        before: Operation,
        advanced: Advanced,
        counters: Counters,
        further: FurtherKey | None = None,
    ) -> None:
        """State, event, counters and the key of the call in one transaction. Raises Superseded."""
        with self._writing() as cursor:
            self._write(cursor, before, advanced)
            self._set(cursor, counters)
            if further is not None:
                cursor.execute(
                    "INSERT INTO further_keys (idempotency_key, operation_id, fingerprint)"
                    " VALUES (?, ?, ?)",
                    (further.key, before.id, further.fingerprint),
                )

    def set_counters(self, counters: Counters) -> None:
        with self._writing() as cursor:
            self._set(cursor, counters)

    def by_id(self, operation_id: str) -> Record | None:
        return self._one("id = ?", operation_id)

    def by_key(self, key: str) -> Record | None:
        """By any of its keys."""
        further = "id = (SELECT operation_id FROM further_keys WHERE idempotency_key = ?)"
        return self._one("idempotency_key = ?", key) or self._one(further, key)

    def known(self, key: str) -> KeyRecord | None:
        """What the key was used for."""
        row = self._db.execute(
            "SELECT fingerprint, id FROM operations WHERE idempotency_key = :key UNION ALL"
            " SELECT fingerprint, operation_id FROM further_keys WHERE idempotency_key = :key",
            {"key": key},
        ).fetchone()
        return None if row is None else KeyRecord(*row)

    def events(self, operation_id: str) -> tuple[OperationEvent, ...]:
        rows = self._db.execute(
            "SELECT operation_id, sequence, type, time, data FROM events"
            " WHERE operation_id = ? ORDER BY sequence",
            (operation_id,),
        )
        return tuple(event_from(row, self.identity) for row in rows)

    def _one(self, condition: str, value: str) -> Record | None:
        return next(iter(self._records(self._db.cursor(), condition, (value,))), None)

    def _records(
        self, cursor: sqlite3.Cursor, condition: str, values: Sequence[str]
    ) -> list[Record]:
        rows = cursor.execute(
            # The conditions are constants of this module; callers give values alone.
            "SELECT document, fingerprint, accepted_revision FROM operations"  # noqa: S608
            f" WHERE {condition} ORDER BY position",
            values,
        ).fetchall()
        return [
            Record(
                operation=operation_from(document),
                fingerprint=fingerprint,
                accepted_revision=revision,
            )
            for document, fingerprint, revision in rows
        ]

    def _write(self, cursor: sqlite3.Cursor, before: Operation, advanced: Advanced) -> None:
        after = advanced.operation
        cursor.execute(
            "UPDATE operations SET state = ?, sequence = ?, ended_at = ?, document = ?"
            " WHERE id = ? AND state = ? AND sequence = ?",
            (
                after.state.value,
                after.sequence,
                None if after.ended_at is None else after.ended_at.isoformat(),
                operation_text(after),
                before.id,
                before.state.value,
                before.sequence,
            ),
        )
        if cursor.rowcount != 1:
            raise Superseded(before.id)
        if advanced.event is not None:
            self._append(cursor, advanced.event)

    @staticmethod
    def _append(cursor: sqlite3.Cursor, event: OperationEvent) -> None:
        cursor.execute(
            "INSERT INTO events (operation_id, sequence, type, time, data) VALUES (?, ?, ?, ?, ?)",
            event_row(event),
        )

    @staticmethod
    def _count(cursor: sqlite3.Cursor) -> int:
        return int(cursor.execute("SELECT count(*) FROM operations").fetchone()[0])

    @staticmethod
    def _counters(cursor: sqlite3.Cursor) -> Counters:
        row = cursor.execute("SELECT revision, pause_epoch, release_epoch FROM engine").fetchone()
        return Counters(*row)

    @staticmethod
    def _set(cursor: sqlite3.Cursor, counters: Counters) -> None:
        cursor.execute(
            "UPDATE engine SET revision = ?, pause_epoch = ?, release_epoch = ?",
            (counters.revision, counters.pause_epoch, counters.release_epoch),
        )


_RESTARTED = OperationError(
    code="ABORTED",
    reason="ENGINE_RESTARTED",
    message="the process that took the order (the engine, or its sidecar) was restarted before the"
    " operation ended; read the engine's state",
    effect=FailureEffect.UNKNOWN,
)


def _prepare(db: sqlite3.Connection, new_identity: str) -> str:
    """Returns the identity of the store."""
    # EXCLUSIVE before the first access: the lock is then taken once and kept.
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("PRAGMA journal_mode = WAL")
    # An acknowledged order must survive the loss of power, not of the process alone.
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if not 0 <= version <= _VERSION:
        raise StoreUnreadable(f"the store has version {version}, this engine knows {_VERSION}")
    db.execute("BEGIN IMMEDIATE")
    try:
        if version == 0:
            for statement in _statements(_SCHEMA):
                db.execute(statement)
            db.execute("INSERT INTO engine VALUES (1, ?, '', 0, 0, 0)", (new_identity,))
        if version < _VERSION:
            for statement in _statements(_FURTHER_KEYS):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {_VERSION}")
        identity = str(db.execute("SELECT identity FROM engine").fetchone()[0])
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
    return identity


def _statements(script: str) -> Iterator[str]:
    """One by one, so that all of them stand in one transaction (executescript commits first)."""
    part = ""
    for line in script.splitlines(keepends=True):
        part += line
        if sqlite3.complete_statement(part):
            yield part
            part = ""
