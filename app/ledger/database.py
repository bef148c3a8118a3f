"""Connections and transactions, set up so that a commit means the same on both databases."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Table, event, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    PendingRollbackError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from app.domain.errors import ChadburnError, InvalidArgument
from app.ledger.errors import LedgerBusy, LedgerNotWritable, LedgerUnavailable
from app.ledger.tables import ledger
from app.ledger.target import LedgerFile, Target

T = TypeVar("T")
_log = logging.getLogger(__name__)

_WRITES = "ledger_writes"  # execution option: this transaction will write

# Fifty who write at once on SQLite wait for one another, four seconds on a machine with two cores.
WAIT_S = 15.0
_BUSY_TIMEOUT_MS = 10_000
_CLOSE_TIMEOUT_S = 35.0  # longer than a statement may take
_TRIES = 10
_NOT_PERMITTED = "42501"
_TAKES_NO_WRITES = {
    "53100": "the disk of the ledger's database is full",
    "25006": "the ledger's database is read-only",
    sqlite3.SQLITE_FULL: "the disk of the ledger is full",
    sqlite3.SQLITE_READONLY: "the file of the ledger is read-only",
    sqlite3.SQLITE_IOERR_WRITE: "the file of the ledger cannot be written",
}

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
}


def _libpq_defaults(target: Target) -> dict[str, str]:
    """Connection parameters for what the URL itself does not say."""
    return {name: value for name, value in _LIBPQ_DEFAULTS.items() if name not in target.url.query}


def libpq_options(engine: AsyncEngine, target: Target) -> dict[str, Any]:
    """All parameters, for a connection to PostgreSQL that is not the pool's."""
    _, options = engine.dialect.create_connect_args(target.url)
    return {**_libpq_defaults(target), **options}


def make_engine(
    target: Target,
    *,
    pool_size: int = 2,
    pool_timeout_s: float = WAIT_S,
    migrating: bool = False,
) -> AsyncEngine:
    """`migrating`: without limits of time, and on SQLite without foreign keys, which would act
    while a table is made again."""
    common: dict[str, Any] = {
        "pool_size": pool_size,
        "max_overflow": 0,
        "pool_timeout": pool_timeout_s,
        # An error's text ends up in logs; what orders contain does not belong there.
        "hide_parameters": True,
    }
    if target.path is not None:
        # sqlite3 would begin transactions by itself, and only before some statements.
        own = {"connect_args": {"isolation_level": None}}
        engine = create_async_engine(target.url, **common, **own)
        pragmas = {**_PRAGMAS, "foreign_keys": (0, 0) if migrating else (1, 1)}
        _configure_sqlite(engine, pragmas)
        return engine
    try:
        engine = create_async_engine(
            target.url,
            **common,
            pool_pre_ping=True,
            # Each statement has to see what was committed before it began: the order of events
            # is read in steps that rely on that, whatever the server's default is.
            isolation_level="READ COMMITTED",
            connect_args=_libpq_defaults(target),
        )
    except ImportError as error:
        missing = "PostgreSQL needs the extra: pip install 'chadburn[postgres]'"
        raise InvalidArgument(missing) from error
    if not migrating:
        _configure_postgres(engine)
    return engine


def _configure_sqlite(engine: AsyncEngine, pragmas: dict[str, tuple[str | int, str | int]]) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def set_pragmas(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        for name, (wanted, expected) in pragmas.items():
            cursor.execute(f"PRAGMA {name} = {wanted}")
            if (given := _one_value(cursor, f"PRAGMA {name}")) != expected:
                # For one, a file system that cannot share memory has no WAL.
                raise LedgerUnavailable(f"SQLite keeps {name} at {given} here")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and then writes would fail at once, whatever the
        # timeout, if another one has written in between. So writers queue up at their beginning.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _configure_postgres(engine: AsyncEngine) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def set_session(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(_SESSION_SETTINGS)
        cursor.close()
        connection.commit()


def _one_value(cursor: DBAPICursor, statement: str) -> object:
    cursor.execute(statement)
    row = cursor.fetchone()
    return None if row is None else row[0]


def for_writing(engine: AsyncEngine) -> AsyncEngine:
    """The same pool; transactions begin as writers."""
    return engine.execution_options(**{_WRITES: True})


def sqlstate_of(error: BaseException | None) -> str | None:
    """PostgreSQL's code for what went wrong, if it is from there."""
    return getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None


@contextmanager
def database_errors() -> Iterator[None]:
    """What the database says about itself, not about a statement, becomes LedgerUnavailable."""
    try:
        yield
    except (IntegrityError, DataError, ProgrammingError) as error:
        if sqlstate_of(error) == _NOT_PERMITTED:
            raise LedgerUnavailable("the database does not permit this user to do that") from error
        if isinstance(error, ProgrammingError) and error.statement is None:
            # Of the connection, before there was one. Its words name what stands in the URL.
            message = "the database URL has parameters that no connection takes"
            raise LedgerUnavailable(message) from None
        raise
    except PoolTimeout as error:
        raise _busy() from error
    except (DBAPIError, PendingRollbackError) as error:
        # The second where a connection broke and whoever cleans up tried to go on with it.
        if (why := _no_writes(error)) is not None:
            raise LedgerNotWritable(why) from error
        raise LedgerUnavailable("the ledger's database does not answer") from error


def _no_writes(error: Exception) -> str | None:
    code = sqlstate_of(error)
    if code is None and isinstance(error, DBAPIError):
        code = getattr(error.orig, "sqlite_errorcode", None)
    return _TAKES_NO_WRITES.get(code)


def _busy() -> LedgerBusy:
    message = "no connection to the ledger's database came free in time"
    return LedgerBusy(message, retry_after_s=1)


class Share:
    """A part of the pool: so many connections at once, and a wait that has an end. Whoever asks
    most can so not take all there are."""

    def __init__(self, most: int, wait_s: float) -> None:
        self._free = asyncio.Semaphore(most)
        self._wait_s = wait_s

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """For the time of the block. Raises LedgerBusy."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise _busy() from None
        try:
            yield
        finally:
            self._free.release()


class Raced(Exception):
    """The transaction met another one that was first. Run again, it sees what that one did."""


def _conflicted(error: LedgerUnavailable) -> bool:
    """The transaction was taken back by the database as one side of a conflict."""
    return sqlstate_of(error.__cause__) in ("40001", "40P01")


@dataclass(slots=True)
class Write:
    """One writing transaction. `placed`: it has taken positions in the order of events."""

    connection: AsyncConnection
    postgres: bool
    placed: bool = False

    def upsert(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """An INSERT that can say what happens on a conflict."""
        return postgresql.insert(table) if self.postgres else sqlite.insert(table)


class Database:
    """Runs transactions, each in a task of its own.

    A caller that is cancelled stops waiting, and the transaction goes on to its end. Cancelled
    in the middle, it could leave the connection in a state nobody knows and out of the pool.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        on_placed: Callable[[], None],
        file: LedgerFile | None = None,
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        """`on_placed` is called after the end of every transaction that took positions. `file`:
        on SQLite, where everything is kept. `wait_s`: for a connection to come free."""
        self.postgres = engine.dialect.name == "postgresql"
        self._engine = engine
        self._writer = for_writing(engine)
        self._on_placed = on_placed
        self._file = file
        size = cast("int", engine.pool.size())  # type: ignore[attr-defined]
        self._readers = Share(max(1, size - 1), wait_s)
        # SQLite takes one writer, and its own waiting for the write lock is by trial and not in
        # order of arrival.
        self._writers = Share(_most_writers(size) if self.postgres else 1, wait_s)
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._writable = True

    async def read(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """On SQLite all of `work` sees one state of the database, on PostgreSQL each statement
        what was committed before it."""
        return await self._to_its_end(self._read(work))

    async def write(self, work: Callable[[Write], Awaitable[T]]) -> T:
        """One transaction, committed when `work` returns. It is run again if `work` raises Raced
        or the database took it back for a conflict, so it must have no effects but those in the
        database."""
        return await self._to_its_end(self._write(work))

    def pool_in_use(self) -> int:
        return cast("int", self._engine.pool.checkedout())  # type: ignore[attr-defined]

    def check_open(self) -> None:
        """Raises LedgerUnavailable once it has been closed."""
        if self._closed:
            raise LedgerUnavailable("the ledger is closed")

    def check_file(self) -> None:
        """Raises LedgerUnavailable where what is written now could not be found again."""
        if self._file is not None:
            self._file.check()

    async def check_writable(self) -> None:
        """Raises LedgerNotWritable where the last write failed for that, and another one does.
        Else nobody who is told to keep away until this is ready would ever find out."""
        if self._file is not None:
            self._file.check_room()
        if not self._writable:
            await self.write(_write_nothing_new)

    async def close(self) -> None:
        """Let what runs come to its end, which on a database that stands still has none."""
        self._closed = True
        if self._running:
            _, late = await asyncio.wait(tuple(self._running), timeout=_CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._engine.dispose()

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            self.check_open()
        except LedgerUnavailable:
            work.close()
            raise
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_tell_of_failure)
            raise

    async def _read(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        with database_errors():
            async with self._readers.one(), self._engine.connect() as connection:
                return await work(connection)

    async def _write(self, work: Callable[[Write], Awaitable[T]]) -> T:
        try:
            done = await self._write_in_turn(work)
        except LedgerNotWritable as error:
            if self._writable:
                _log.error("nothing can be written at present: %s", error.message)
            self._writable = False
            raise
        self._writable = True
        return done

    async def _write_in_turn(self, work: Callable[[Write], Awaitable[T]]) -> T:
        for _ in range(_TRIES):
            try:
                with database_errors():
                    return await self._write_once(work)
            except Raced:
                continue
            except LedgerUnavailable as error:
                if not _conflicted(error):
                    raise
        raise LedgerUnavailable("too many writers want the same thing at once")

    async def _write_once(self, work: Callable[[Write], Awaitable[T]]) -> T:
        write: Write | None = None
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._writers.one())
                connection = await stack.enter_async_context(self._writer.begin())
                write = Write(connection, self.postgres)
                done = await work(write)
                self.check_file()
                return done
        finally:
            if write is not None and write.placed:
                # Also when it was rolled back: readers may have been waiting behind its place.
                self._on_placed()


async def _write_nothing_new(write: Write) -> None:
    # Up and down again: what is the same as before at each step is not written.
    for step in (1, -1):
        await write.connection.execute(update(ledger).values(pruned_to=ledger.c.pruned_to + step))


def _most_writers(pool_size: int) -> int:
    """Some are always left to those who read."""
    return max(1, pool_size - (2 if pool_size >= 5 else 1))


def _tell_of_failure(task: asyncio.Task[Any]) -> None:
    """Nobody waits any more: a refusal concerns no one, a fault should not go unseen."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, ChadburnError):
        _log.error("a ledger transaction failed after its caller had gone", exc_info=error)
