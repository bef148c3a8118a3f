"""Indexes are built while others write; a building that was broken off is gone on with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event

from app.ledger import upgrade
from app.ledger.errors import LedgerUnavailable
from app.ledger.schema import Climb, ReleaseSchema
from tests.migrations.releases import migrate

pytestmark = pytest.mark.anyio

BEFORE = "0006"
_WAITS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND query LIKE 'CREATE INDEX%' AND wait_event_type = 'Lock'"
)
_HALF_BUILT = "SELECT count(*) FROM pg_index WHERE NOT indisvalid"

Connection = psycopg.AsyncConnection[Any]


async def one(connection: Connection, query: str) -> Any:
    row = await (await connection.execute(query.encode())).fetchone()
    return None if row is None else row[0]


@asynccontextmanager
async def held_up(url: str) -> AsyncIterator[tuple[asyncio.Task[Climb], Connection, int]]:
    """An upgrade that waits for a writer who was there before it, and goes on at the end; a
    connection beside it, and the number of the process that builds."""
    await migrate(url, BEFORE)
    where = url.replace("+psycopg", "")
    async with (
        await psycopg.AsyncConnection.connect(where, autocommit=True) as beside,
        await psycopg.AsyncConnection.connect(where) as earlier,
    ):
        await earlier.execute("LOCK TABLE operations IN ROW EXCLUSIVE MODE")
        upgrading = asyncio.create_task(upgrade(url))
        try:
            async with asyncio.timeout(60):
                while (builder := await one(beside, _WAITS)) is None:
                    assert not upgrading.done(), await upgrading
                    await asyncio.sleep(0.05)
            yield upgrading, beside, builder
        finally:
            await earlier.rollback()
            await asyncio.gather(upgrading, return_exceptions=True)


async def test_nobody_waits_for_an_index(postgres_url: str) -> None:
    async with held_up(postgres_url) as (upgrading, beside, _):
        await beside.execute("SET lock_timeout = '30s'")
        await beside.execute("UPDATE operations SET reason = 'written meanwhile'")
        assert not upgrading.done()
    assert upgrading.result() == Climb(BEFORE, ReleaseSchema().head)


async def test_an_index_that_was_left_half_built_is_made_again(postgres_url: str) -> None:
    async with held_up(postgres_url) as (upgrading, beside, builder):
        await beside.execute("SELECT pg_terminate_backend(%s)", (builder,))
        with pytest.raises(LedgerUnavailable):
            await upgrading
        assert await one(beside, _HALF_BUILT) == 1
        assert await one(beside, "SELECT version_num FROM alembic_version") == BEFORE
    assert await upgrade(postgres_url) == Climb(BEFORE, ReleaseSchema().head)
    where = postgres_url.replace("+psycopg", "")
    async with await psycopg.AsyncConnection.connect(where) as connection:
        assert await one(connection, _HALF_BUILT) == 0


async def test_what_a_building_commits_before_it_says_who_may_use_it(postgres_url: str) -> None:
    """Broken off there, older gateways go on."""
    await migrate(postgres_url, "0005")

    def stop(*what: Any) -> None:
        if "CREATE INDEX CONCURRENTLY" in what[2]:
            raise ConnectionError

    event.listen(Engine, "before_cursor_execute", stop)
    try:
        with pytest.raises((ConnectionError, LedgerUnavailable)):
            await upgrade(postgres_url)
    finally:
        event.remove(Engine, "before_cursor_execute", stop)
    where = postgres_url.replace("+psycopg", "")
    async with await psycopg.AsyncConnection.connect(where) as connection:
        assert await one(connection, "SELECT version_num FROM alembic_version") == BEFORE
        assert await one(connection, "SELECT compatible_from FROM ledger") == "0005"
    assert await upgrade(postgres_url) == Climb(BEFORE, ReleaseSchema().head)
