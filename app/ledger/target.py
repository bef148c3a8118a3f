"""Which database a URL means, and the process's sole hold on a SQLite file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from app.domain.errors import InvalidArgument
from app.ledger.errors import LedgerInUse, LedgerNotWritable, LedgerUnavailable, SchemaBehind

_ORDER_BYTES = 128 * 1024  # what an order may add to the log, and more


@dataclass(frozen=True, slots=True)
class Target:
    """`path`: the file of a SQLite ledger, with links resolved; None for PostgreSQL."""

    url: URL
    path: Path | None

    def require(self) -> None:
        """Before the file is opened by whoever does not mean to make one.

        Raises SchemaBehind: it is not there. LedgerUnavailable: it cannot be used.
        """
        if self.path is None:
            return
        try:
            found = self.path.exists()
        except OSError:  # not to be looked at
            found = True
        if not found:
            raise SchemaBehind(f"there is no ledger at {self.path} yet")
        # To read in a database of this kind takes writing too: readers enter themselves in a file
        # beside it.
        if not (os.access(self.path, os.R_OK | os.W_OK) and os.access(self.path.parent, os.W_OK)):
            raise LedgerUnavailable(
                "the file of the SQLite ledger and its folder must be readable and writable"
            )


def target_of(url: str) -> Target:
    """Raises InvalidArgument for what is neither a SQLite file nor PostgreSQL."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise InvalidArgument("the database URL cannot be read") from error
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return Target(parsed.set(drivername="postgresql+psycopg"), None)
    if parsed.drivername not in ("sqlite", "sqlite+aiosqlite"):
        raise InvalidArgument(
            "the ledger is kept in sqlite+aiosqlite:///path or postgresql+psycopg://…"
        )
    name = parsed.database or ""
    if not name or name.startswith((":", "file:")) or parsed.query:
        # In memory nothing would outlive the process, and a second one could not be told apart.
        raise InvalidArgument("a SQLite ledger is a plain file: sqlite+aiosqlite:///path")
    # Two ways to one file must end at the same lock.
    path = Path(os.path.realpath(name))
    return Target(parsed.set(drivername="sqlite+aiosqlite", database=str(path)), path)


def shown(url: str) -> str:
    """The database without what may be a secret: user, password and parameters."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return "the database"
    if parsed.drivername.startswith("sqlite"):
        return parsed.database or "the database"
    port = f":{parsed.port}" if parsed.port else ""
    scheme = parsed.drivername.partition("+")[0]
    return f"{scheme}://{parsed.host or ''}{port}/{parsed.database or ''}"


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """The file that was opened, whatever its path leads to later."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> LedgerFile:
        found = os.stat(path)
        return cls(path, found.st_dev, found.st_ino)

    def check(self) -> None:
        """Raises LedgerUnavailable once the path leads to another file, or to none. SQLite would
        go on with the one that is open, and all that was told would be gone with the process."""
        try:
            there = LedgerFile.at(self.path)
        except OSError:
            there = None
        if there != self:
            raise LedgerUnavailable("the file of the SQLite ledger was removed or replaced")

    def check_room(self) -> None:
        """Raises LedgerNotWritable where the disk has no room for an order. Small writes may find
        a place in the log that is there already, and say nothing of the next order."""
        try:
            found = os.statvfs(self.path)
        except OSError:
            return
        if found.f_bavail * found.f_frsize < _ORDER_BYTES:
            raise LedgerNotWritable("the disk of the ledger is full")


@contextmanager
def sole_process(target: Target) -> Iterator[None]:
    """On SQLite: until the end no other process, and no second ledger in this one, may have the
    file. The system gives the lock back when a process ends, however it ends.

    Raises LedgerInUse, or LedgerUnavailable when the folder is missing or cannot be written.
    """
    if target.path is None:
        yield
        return
    if not os.path.isdir(target.path.parent):
        # Made here, it might hide that the real one is not mounted.
        raise LedgerUnavailable("the folder of the SQLite ledger is not there")
    lock = FileLock(f"{target.path}.lock", mode=0o600, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise LedgerInUse(
            "another process has this SQLite ledger open; several gateways need PostgreSQL"
        ) from error
    except OSError as error:
        raise LedgerUnavailable("the folder of the SQLite ledger cannot be written") from error
    try:
        # The ledger names people and what they did. SQLite gives its side files the same mode.
        os.close(os.open(target.path, os.O_RDWR | os.O_CREAT, 0o600))
        yield
    except OSError as error:
        raise LedgerUnavailable("the file of the SQLite ledger cannot be written") from error
    finally:
        lock.release()
