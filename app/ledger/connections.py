"""How connections are made, and set up so that a commit means the same on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from app.domain.errors import InvalidArgument
from app.ledger.errors import LedgerUnavailable
from app.ledger.target import Target

_WRITES = "ledger_writes"  # execution option: this transaction will write
WAIT_S = 15.0
"""For a connection to come free: fifty who write at once on SQLite wait for one another."""

_BUSY_TIMEOUT_MS = 10_000
_CACHE_KB = 16_000

# A connection that went dead without a word is given up within half a minute.
_LIBPQ_DEFAULTS = {
    "application_name": "chadburn",
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

# A gateway that stands still inside a transaction would hold every reader back at its place in
# the order of events; the database ends it. And where the server is set to acknowledge commits
# that are not on disk yet, the ledger is not content with that.
_SESSION_SETTINGS = """
SELECT set_config('statement_timeout', '30s', false),
       set_config('lock_timeout', '10s', false),
       set_config('idle_in_transaction_session_timeout', '30s', false),
       CASE WHEN current_setting('synchronous_commit') = 'off'
            THEN set_config('synchronous_commit', 'on', false) END
"""

_PRAGMAS: dict[str, tuple[str | int, str | int]] = {
    "journal_mode": ("WAL", "wal"),
    "synchronous": ("FULL", 2),
    "busy_timeout": (_BUSY_TIMEOUT_MS, _BUSY_TIMEOUT_MS),
    # The upper pages of the indexes of a long ledger, which 2 MB do not hold.
    "cache_size": (-_CACHE_KB, -_CACHE_KB),
}


def _libpq_defaults(target: Target) -> dict[str, str]:
    """Connection parameters for what the URL itself does not say."""
    return {name: value for name, value in _LIBPQ_DEFAULTS.items() if name not in target.url.query}


def libpq_options(engine: Engine, target: Target) -> dict[str, Any]:
    """All parameters, for a connection to PostgreSQL that is not the pool's."""
    _, options = engine.dialect.create_connect_args(target.url)
    return {**_libpq_defaults(target), **options}


def make_engine(
    target: Target, *, pool_timeout_s: float = WAIT_S, migrating: bool = False
) -> AsyncEngine:
    """For what is done now and then. `migrating`: without limits of time, and on SQLite without
    foreign keys, which would act while a table is made again."""
    options = {**_options(target), "pool_size": 2, "pool_timeout": pool_timeout_s}
    with _driver():
        engine = create_async_engine(target.url, **options)
    _configure(engine.sync_engine, migrating=migrating)
    return engine


def make_blocking_engine(
    target: Target, *, pool_size: int, pool_timeout_s: float = WAIT_S
) -> Engine:
    """The same, for transactions that run in threads."""
    options = {**_options(target), "pool_size": pool_size, "pool_timeout": pool_timeout_s}
    url = target.url
    if target.path is not None:
        url = url.set(drivername="sqlite+pysqlite")
        # One thread at a time, but not always the same one.
        options["connect_args"] = {**options["connect_args"], "check_same_thread": False}
        options["poolclass"] = QueuePool
        # Each has a cache of its own: the one that was used last has what is asked for next.
        options["pool_use_lifo"] = True
    with _driver():
        engine = create_engine(url, **options)
    _configure(engine, migrating=False)
    return engine


def _options(target: Target) -> dict[str, Any]:
    common: dict[str, Any] = {
        "max_overflow": 0,
        # An error's text ends up in logs; what orders contain does not belong there.
        "hide_parameters": True,
    }
    if target.path is not None:
        # sqlite3 would begin transactions by itself, and only before some statements.
        return {**common, "connect_args": {"isolation_level": None}}
    return {
        **common,
        "pool_pre_ping": True,
        # Each statement has to see what was committed before it began: the order of events
        # is read in steps that rely on that, whatever the server's default is.
        "isolation_level": "READ COMMITTED",
        "connect_args": _libpq_defaults(target),
    }


@contextmanager
def _driver() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        missing = "PostgreSQL needs the extra: pip install 'chadburn[postgres]'"
        raise InvalidArgument(missing) from error


def _configure(engine: Engine, *, migrating: bool) -> None:
    if engine.dialect.name == "sqlite":
        foreign_keys = (0, 0) if migrating else (1, 1)
        _configure_sqlite(engine, {**_PRAGMAS, "foreign_keys": foreign_keys})
    elif not migrating:
        _configure_postgres(engine)


def _configure_sqlite(engine: Engine, pragmas: dict[str, tuple[str | int, str | int]]) -> None:
    @event.listens_for(engine, "connect")
    def set_pragmas(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        for name, (wanted, expected) in pragmas.items():
            cursor.execute(f"PRAGMA {name} = {wanted}")
            if (given := _one_value(cursor, f"PRAGMA {name}")) != expected:
                # For one, a file system that cannot share memory has no WAL.
                raise LedgerUnavailable(f"SQLite keeps {name} at {given} here")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and then writes would fail at once, whatever the
        # timeout, if another one has written in between. So writers queue up at their beginning.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _configure_postgres(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def set_session(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(_SESSION_SETTINGS)
        cursor.close()
        connection.commit()


def _one_value(cursor: DBAPICursor, statement: str) -> object:
    cursor.execute(statement)
    row = cursor.fetchone()
    return None if row is None else row[0]


_AnyEngine = TypeVar("_AnyEngine", Engine, AsyncEngine)


def for_writing(engine: _AnyEngine) -> _AnyEngine:
    """The same pool; transactions begin as writers."""
    return engine.execution_options(**{_WRITES: True})
