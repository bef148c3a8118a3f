"""Transactions, each whole in a thread of its own.

What a transaction does is written as a coroutine over :class:`Statements`, and waits for nothing
but those. So it can be run to its end by whoever has a thread, without the event loop: one hop
there and back instead of one for each statement, which with drivers for asyncio took most of the
time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, overload
from weakref import WeakSet

from sqlalchemy import Connection, CursorResult, Dialect, Engine, Executable, Table, event, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    PendingRollbackError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql.selectable import TypedReturnsRows

from app.domain.errors import ChadburnError
from app.ledger.connections import WAIT_S, for_writing
from app.ledger.errors import LedgerBusy, LedgerNotWritable, LedgerUnavailable
from app.ledger.tables import ledger
from app.ledger.target import LedgerFile

T = TypeVar("T")
Row = TypeVar("Row", bound=Any)
_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 35.0  # longer than a statement may take
_CUT_OFF_S = 5.0
_TRIES = 10
_NOT_PERMITTED = "42501"
_TAKES_NO_WRITES = {
    "53100": "the disk of the ledger's database is full",
    "25006": "the ledger's database is read-only",
    sqlite3.SQLITE_FULL: "the disk of the ledger is full",
    sqlite3.SQLITE_READONLY: "the file of the ledger is read-only",
    sqlite3.SQLITE_IOERR_WRITE: "the file of the ledger cannot be written",
}


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
        await self.take()
        try:
            yield
        finally:
            self.give_back()

    async def take(self) -> None:
        """To be given back. Raises LedgerBusy."""
        if not self._free.locked():
            await self._free.acquire()  # at once, and without a clock that is set and stopped
            return
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise _busy() from None

    def give_back(self) -> None:
        self._free.release()


class Raced(Exception):
    """The transaction met another one that was first. Run again, it sees what that one did."""


def _conflicted(error: LedgerUnavailable) -> bool:
    """The transaction was taken back by the database as one side of a conflict."""
    return sqlstate_of(error.__cause__) in ("40001", "40P01")


class Statements(Protocol):
    """What a transaction can do. Also SQLAlchemy's own AsyncConnection."""

    @property
    def dialect(self) -> Dialect: ...

    @overload
    async def execute(
        self, statement: TypedReturnsRows[Row], parameters: Any = None, /
    ) -> CursorResult[Row]: ...

    @overload
    async def execute(
        self, statement: Executable, parameters: Any = None, /
    ) -> CursorResult[Any]: ...

    async def run_sync(self, work: Callable[[Connection], T], /) -> T: ...


class _Blocking:
    """Statements that are over when they return."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect

    async def execute(self, statement: Executable, parameters: Any = None, /) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters)

    async def run_sync(self, work: Callable[[Connection], T], /) -> T:
        return work(self._connection)


def _driven(work: Awaitable[T]) -> T:
    """Run a coroutine that waits for nothing but blocking statements."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as done:
        return cast("T", done.value)
    raise AssertionError("a transaction waited for something else than its statements")


@dataclass(slots=True)
class Write:
    """One writing transaction. `placed`: it has taken positions in the order of events."""

    connection: Statements
    postgres: bool
    placed: bool = False

    def upsert(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """An INSERT that can say what happens on a conflict."""
        return postgresql.insert(table) if self.postgres else sqlite.insert(table)


class Database:
    """Runs transactions.

    A caller that is cancelled stops waiting, and the transaction goes on to its end. Cancelled
    in the middle, it could leave the connection in a state nobody knows and out of the pool.
    """

    def __init__(
        self,
        engine: Engine,
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
        readers = max(1, size - 1)
        # SQLite takes one writer, and its own waiting for the write lock is by trial and not in
        # order of arrival.
        writers = _most_writers(size) if self.postgres else 1
        self._readers = Share(readers, wait_s)
        self._writers = Share(writers, wait_s)
        # For each that has its share: the wait for a connection is the pool's, which has an end.
        self._threads = ThreadPoolExecutor(readers + writers, "ledger")
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False
        self._writable = True
        self._connected: WeakSet[Any] = WeakSet()
        if self.postgres:
            event.listen(engine, "connect", self._note_connection)

    async def read(self, work: Callable[[Statements], Awaitable[T]]) -> T:
        """On SQLite all of `work` sees one state of the database, on PostgreSQL each statement
        what was committed before it. `work` waits for nothing but its statements."""

        def transaction() -> T:
            with self._engine.connect() as connection:
                return _driven(work(_Blocking(connection)))

        self.check_open()
        with database_errors():
            await self._readers.take()
            try:
                self.check_open()
                reading = self._in_a_thread(transaction)
            except BaseException:
                self._readers.give_back()
                raise
            # Whatever becomes of whoever waits for it.
            self._running.add(reading)
            reading.add_done_callback(self._has_read)
            try:
                return await asyncio.shield(reading)
            except asyncio.CancelledError:
                reading.add_done_callback(_tell_of_failure)
                raise

    async def write(self, work: Callable[[Write], Awaitable[T]]) -> T:
        """One transaction, committed when `work` returns. It is run again if `work` raises Raced
        or the database took it back for a conflict, so it must have no effects but those in the
        database, and waits for nothing but its statements."""
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
            if late:
                self._cut_off()
                _, late = await asyncio.wait(late, timeout=_CUT_OFF_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._engine.dispose)

    def _note_connection(self, connection: DBAPIConnection, _record: object) -> None:
        self._connected.add(connection)

    def _cut_off(self) -> None:
        """A thread waits for a server that says nothing, for as long as there is a connection."""
        for connection in self._connected:
            with suppress(Exception):  # one that is closed already has no number
                line = socket.socket(fileno=os.dup(connection.fileno()))
                with line:
                    line.shutdown(socket.SHUT_RDWR)

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

    def _in_a_thread(self, transaction: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, copy_context().run, transaction)

    def _has_read(self, reading: asyncio.Future[Any]) -> None:
        self._running.discard(reading)
        self._readers.give_back()

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
        begun: list[Write] = []

        def transaction() -> T:
            with self._writer.begin() as connection:
                write = Write(_Blocking(connection), self.postgres)
                begun.append(write)
                done = _driven(work(write))
                self.check_file()
                return done

        try:
            async with self._writers.one():
                return await self._in_a_thread(transaction)
        finally:
            if any(write.placed for write in begun):
                # Also when it was rolled back: readers may have been waiting behind its place.
                self._on_placed()


async def _write_nothing_new(write: Write) -> None:
    # Up and down again: what is the same as before at each step is not written.
    for step in (1, -1):
        await write.connection.execute(update(ledger).values(pruned_to=ledger.c.pruned_to + step))


def _most_writers(pool_size: int) -> int:
    """Some are always left to those who read."""
    return max(1, pool_size - (2 if pool_size >= 5 else 1))


def _tell_of_failure(task: asyncio.Future[Any]) -> None:
    """Nobody waits any more: a refusal concerns no one, a fault should not go unseen."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, ChadburnError):
        _log.error("a ledger transaction failed after its caller had gone", exc_info=error)
