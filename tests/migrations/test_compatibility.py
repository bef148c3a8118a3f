"""Which releases work on which schema: gateways are replaced one by one, while others go on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect

from app.clock import uuid7
from app.domain.transitions import Completed, Dispatched
from app.ledger import Ledger, check, upgrade
from app.ledger.errors import SchemaBehind
from app.ledger.pruning import Portion, Pruned
from app.ledger.schema import NEEDS, Climb, ReleaseSchema, Standing, alone
from app.ledger.values import AuditFilter
from tests.ledger.samples import (
    SetClock,
    accept,
    check_invariants,
    claim,
    order,
    record,
    with_engine,
)
from tests.migrations.releases import UPGRADE, in_order, installed, migrate, next_revision, run

pytestmark = pytest.mark.anyio

EXPANDED = """
    op.add_column("operations", sa.Column("notes", sa.Text))
    op.add_column("events", sa.Column("weight", sa.Integer, nullable=False, server_default="1"))
    op.create_table("more", sa.Column("id", sa.Integer, primary_key=True))
    op.create_index("ix_more", "audit", ["reason"])
"""


async def test_this_release_on_the_next_one_s_schema(url: str, tmp_path: Path) -> None:
    """Gateways are replaced one by one: the first new one upgrades, and the others go on; also
    one that is started again, or that was running meanwhile."""
    running = await Ledger.open(url, clock=SetClock(), migrate=True)
    await with_engine(running)
    if url.startswith("sqlite"):
        await running.close()
    folder = installed(tmp_path / "site", EXPANDED, compatible_from=ReleaseSchema().head)
    done = run(folder, UPGRADE, url, str(folder))
    newer = Standing(next_revision(), ReleaseSchema().head)
    assert done.stdout.strip() == newer.revision, done.stderr
    if not url.startswith("sqlite"):
        await running.check()
        await course_of(running)
        await running.close()
    assert await check(url) == newer
    assert await upgrade(url) == Climb(newer.revision, newer.revision)
    for migrate_first in (False, True):
        again = await Ledger.open(url, clock=SetClock(), migrate=migrate_first)
        try:
            await course_of(again)
        finally:
            await again.close()


async def test_this_release_on_the_oldest_schema_that_it_takes(url: str) -> None:
    """The new gateway before the upgrade: it works on what `NEEDS` names, and on nothing older."""
    await migrate(url, NEEDS)
    assert (await check(url)).revision == NEEDS
    ledger = await Ledger.open(url, clock=SetClock())
    try:
        await with_engine(ledger)
        await course_of(ledger)
        await ledger.check()
    finally:
        await ledger.close()
    chain = in_order(ReleaseSchema())
    before = chain[chain.index(NEEDS) - 1]
    await migrate(url, "base")
    await migrate(url, before)
    for attempt in (check(url), Ledger.open(url, clock=SetClock())):
        with pytest.raises(SchemaBehind, match=f"is {before}, this release needs {NEEDS}"):
            await attempt


@dataclass(frozen=True)
class Demands:
    """What a program meets that was written for a table. `must`: columns that each new row has to
    give a value."""

    columns: set[str]
    must: set[str]
    rules: list[str]
    unique: list[list[str]]


def test_migrations_say_truly_which_releases_they_leave_working(tmp_path: Path) -> None:
    """What an older release relies on stays, and nothing is asked of its writes that it does not
    know of."""
    url = f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
    schema = ReleaseSchema()
    revisions = in_order(schema)
    before, oldest = asyncio.run(demands(url, revisions[0])), 0
    for place, revision in enumerate(revisions[1:], start=1):
        after = asyncio.run(demands(url, revision))
        stated = revisions.index(schema.compatible_from(revision))
        assert oldest <= stated <= place, "what was taken away once does not come back"
        for table, now in before.items() if stated < place else ():
            then = after[table]
            assert then.columns >= now.columns
            assert (then.must, then.rules, then.unique) == (now.must, now.rules, now.unique)
        before, oldest = after, stated


async def demands(url: str, revision: str) -> dict[str, Demands]:
    await migrate(url, revision)

    def look(connection: Connection) -> dict[str, Demands]:
        inspector = inspect(connection)
        found = {}
        for table in inspector.get_table_names():
            columns = inspector.get_columns(table)
            single: list[Any] = [*inspector.get_unique_constraints(table)]
            single += [index for index in inspector.get_indexes(table) if index["unique"]]
            found[table] = Demands(
                columns={str(column["name"]) for column in columns},
                must={
                    str(column["name"])
                    for column in columns
                    if not column["nullable"] and column["default"] is None
                },
                rules=sorted(rule["sqltext"] for rule in inspector.get_check_constraints(table)),
                unique=sorted(rule["column_names"] for rule in single),
            )
        return found

    async with alone(url) as connection:
        return await connection.run_sync(look)


async def course_of(ledger: Ledger) -> None:
    """What a gateway does with a ledger, from the acceptance to what is kept no longer."""
    taken = await accept(ledger, order(), key=claim(uuid7()))
    lease = await ledger.leases.acquire("e1", "me", 1.0)
    assert lease is not None
    now = await record(ledger, taken, Dispatched(), lease=lease)
    ended = await record(ledger, now, Completed(result={}), lease=lease)
    await ledger.leases.release(lease)
    assert await ledger.operations.get(taken.id) == ended
    await check_invariants(ledger)
    assert (await ledger.audit.page(AuditFilter())).items
    assert await ledger.pruning.keys() == Portion(Pruned(), more=False)
