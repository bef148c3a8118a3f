"""A database that is there and takes no writes: the disk is full, or it is a standby."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import psycopg
import pytest

from app.clock import SystemClock
from app.domain.kinds import OperationKind
from app.ledger import Ledger
from app.ledger.errors import LedgerNotWritable, LedgerUnavailable
from tests.ledger.samples import SetClock, accept, order, with_engine

pytestmark = pytest.mark.anyio

Obstacle = Callable[[], AbstractContextManager[None]]


@contextmanager
def _no_file_grows() -> Iterator[None]:
    """The system refuses what SQLite writes, as it does where no space is left."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@contextmanager
def _read_only(url: str) -> Iterator[None]:
    """For all connections, which are made again."""

    def turn(setting: str) -> None:
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            of_database = f"DATABASE {connection.info.dbname}"
            connection.execute(
                f"ALTER {of_database} SET default_transaction_read_only = {setting}".encode()
            )
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    turn("on")
    try:
        yield
    finally:
        turn("off")


@pytest.fixture
def obstacle(ledger_url: str) -> Obstacle:
    if ledger_url.startswith("sqlite"):
        return _no_file_grows
    return lambda: _read_only(ledger_url)


async def test_it_is_not_ready_until_something_can_be_written_again(
    ledger: Ledger, obstacle: Obstacle
) -> None:
    await with_engine(ledger)
    known = await accept(ledger, order(OperationKind.ABORT_REQUESTS))
    late = order(OperationKind.ABORT_REQUESTS)
    with obstacle():
        with pytest.raises(LedgerNotWritable):
            await accept(ledger, late)
        assert await ledger.operations.get(known.id) == known, "reads go on"
        for _ in range(2):
            with pytest.raises(LedgerUnavailable):
                await ledger.check()
        assert await ledger.operations.get(late.id) is None
    await ledger.check()
    assert await accept(ledger, late) == late


async def test_clocks_that_disagree_are_said_once(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    system = SystemClock()
    clock = SetClock(system.now() + timedelta(minutes=10))
    ledger = await Ledger.open(postgres_url, clock=clock, migrate=True)
    try:
        await ledger.check()
        said = [each.getMessage() for each in caplog.records if "clock" in each.getMessage()]
        assert len(said) == 1, said
        assert "ahead of the database's" in said[0]
    finally:
        await ledger.close()
