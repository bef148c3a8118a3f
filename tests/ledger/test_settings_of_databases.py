"""What a connection is set to, what a URL may be, and what is said when it does not work."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from app.domain.errors import InvalidArgument
from app.ledger import Ledger, check, upgrade
from app.ledger.connections import make_blocking_engine
from app.ledger.database import Database, Statements, Write
from app.ledger.errors import LedgerUnavailable, SchemaBehind
from app.ledger.target import target_of
from tests.ledger.samples import SetClock, accept, order, with_engine

pytestmark = pytest.mark.anyio


async def one(connection: Statements, statement: str) -> object:
    return (await connection.execute(text(statement))).scalar_one()


async def test_sqlite_writes_through_to_the_disk(tmp_path: Path, clock: SetClock) -> None:
    path = tmp_path / "ledger.db"
    ledger = await Ledger.open(f"sqlite:///{path}", clock=clock, migrate=True)

    async def look(connection: Statements) -> dict[str, object]:
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return {name: await one(connection, f"PRAGMA {name}") for name in names}

    try:
        assert await ledger.events._database.read(look) == {
            "journal_mode": "wal",
            "synchronous": 2,
            "foreign_keys": 1,
            "busy_timeout": 10_000,
        }
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name
    finally:
        await ledger.close()


@pytest.mark.parametrize("replaced", [False, True])
async def test_nothing_is_taken_on_in_a_file_that_was_taken_away(
    tmp_path: Path, clock: SetClock, replaced: bool
) -> None:
    """SQLite would go on writing to the file that has no name any more."""
    path = tmp_path / "ledger.db"
    ledger = await Ledger.open(f"sqlite:///{path}", clock=clock, migrate=True)
    try:
        await with_engine(ledger)
        await ledger.check()
        path.rename(tmp_path / "elsewhere.db")
        if replaced:
            path.write_bytes((tmp_path / "elsewhere.db").read_bytes())
        with pytest.raises(LedgerUnavailable, match="removed or replaced"):
            await accept(ledger, order())
        with pytest.raises(LedgerUnavailable):
            await ledger.check()
        (tmp_path / "elsewhere.db").replace(path)
        await ledger.check()
        await accept(ledger, order())
        assert len(await ledger.operations.open_ones()) == 1
    finally:
        await ledger.close()


async def test_a_write_transaction_begins_as_one(tmp_path: Path) -> None:
    """Another program that has the file locked is waited for at the beginning, not in between."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    await upgrade(url)
    database = Database(make_blocking_engine(target_of(url), pool_size=2), on_placed=lambda: None)
    other = make_blocking_engine(target_of(url), pool_size=1)

    async def work(write: Write) -> None:
        with other.connect() as stranger:
            stranger.exec_driver_sql("PRAGMA busy_timeout = 0")
            with pytest.raises(Exception, match="locked"):
                stranger.exec_driver_sql("UPDATE ledger SET pruned_to = 1")
        assert await one(write.connection, "SELECT pruned_to FROM ledger") == 0

    try:
        await database.write(work)
    finally:
        other.dispose()
        await database.close()


async def test_postgres_sessions_are_bounded_and_durable(
    postgres_url: str, clock: SetClock
) -> None:
    plain = postgres_url.replace("+psycopg", "")
    with psycopg.connect(plain, autocommit=True) as setup:
        name = setup.info.dbname
        setup.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
        setup.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
        setup.execute(f"ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'")
    ledger = await Ledger.open(postgres_url, clock=clock, migrate=True)

    async def look(connection: Statements) -> dict[str, object]:
        names = (
            "synchronous_commit",
            "transaction_isolation",
            "statement_timeout",
            "lock_timeout",
            "idle_in_transaction_session_timeout",
        )
        return {name: await one(connection, f"SHOW {name}") for name in names}

    try:
        assert await ledger.events._database.read(look) == {
            "synchronous_commit": "on",
            "transaction_isolation": "read committed",
            "statement_timeout": "30s",
            "lock_timeout": "10s",
            "idle_in_transaction_session_timeout": "30s",
        }
        await with_engine(ledger)
        given = await accept(ledger, order())
        assert await ledger.operations.get(given.id) == given
    finally:
        await ledger.close()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite+aiosqlite:///file:x?mode=memory",
        "sqlite:////tmp/x.db?cache=shared",
        "mysql://localhost/x",
        "postgresql+asyncpg://localhost/x",
        "not a url",
        "",
    ],
)
async def test_other_urls_are_refused_by_name(url: str, clock: SetClock) -> None:
    with pytest.raises(InvalidArgument):
        await Ledger.open(url, clock=clock)
    with pytest.raises(InvalidArgument):
        await upgrade(url)
    with pytest.raises(InvalidArgument):
        await check(url)


async def test_a_folder_that_is_missing_is_said_so(tmp_path: Path, clock: SetClock) -> None:
    with pytest.raises(LedgerUnavailable, match="folder"):
        await Ledger.open(f"sqlite:///{tmp_path}/no/ledger.db", clock=clock, migrate=True)
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(LedgerUnavailable, match="file"):
        await Ledger.open(f"sqlite:///{tmp_path}/folder.db", clock=clock)


async def test_a_file_that_is_no_database_is_said_so(tmp_path: Path, clock: SetClock) -> None:
    (tmp_path / "ledger.db").write_text("hello, this is a note and no database" * 50)
    with pytest.raises(LedgerUnavailable):
        await Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock, migrate=True)
    # And the refusal holds nothing.
    os.remove(tmp_path / "ledger.db")
    ledger = await Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock, migrate=True)
    await ledger.close()


async def test_a_server_that_is_not_there_is_said_so(tmp_path: Path, clock: SetClock) -> None:
    url = f"postgresql://nobody@/none?host={tmp_path}"
    for attempt in (Ledger.open(url, clock=clock), upgrade(url), check(url)):
        with pytest.raises(LedgerUnavailable):
            await attempt


async def test_readiness_tells_what_is_wrong(
    postgres_url: str, postgres_server: dict[str, Any], clock: SetClock
) -> None:
    with pytest.raises(SchemaBehind):
        await Ledger.open(postgres_url, clock=clock)
    ledger = await Ledger.open(postgres_url, clock=clock, migrate=True)
    try:
        await ledger.check()
        with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as other:
            other.execute("DELETE FROM alembic_version")
            name = other.info.dbname
        with pytest.raises(SchemaBehind):
            await ledger.check()
        with psycopg.connect(**postgres_server, dbname="postgres", autocommit=True) as other:
            other.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                (name,),
            )
        with pytest.raises(LedgerUnavailable):
            await ledger.check()
    finally:
        await ledger.close()


async def test_each_ledger_has_an_identity_that_stays(ledger_url: str, clock: SetClock) -> None:
    first = await Ledger.open(ledger_url, clock=clock, migrate=True)
    await first.close()
    second = await Ledger.open(ledger_url, clock=clock, migrate=True)
    await second.close()
    assert first.identity == second.identity
    assert len(bytes.fromhex(first.identity)) == 4
