"""The same migrations on both databases: up, down, up again; from a checkout and from a wheel."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from app.ledger import Ledger, check, upgrade
from app.ledger.errors import LedgerUnavailable, SchemaAhead, SchemaBehind, UpgradeBusy
from app.ledger.schema import Climb, ReleaseSchema, Standing, alone
from app.ledger.tables import metadata
from tests.ledger.samples import SetClock, accept, order, with_engine
from tests.migrations.releases import ROOT, UPGRADE, installed, migrate, next_revision, run

pytestmark = pytest.mark.anyio


async def seen(url: str) -> dict[str, set[str]]:
    """The tables, with the names of all their constraints and indexes."""

    def look(connection: Connection) -> dict[str, set[str]]:
        inspector = inspect(connection)
        tables: dict[str, set[str]] = {}
        for table in inspector.get_table_names():
            named: list[Any] = [
                inspector.get_pk_constraint(table),
                *inspector.get_unique_constraints(table),
                *inspector.get_check_constraints(table),
                *inspector.get_foreign_keys(table),
                *inspector.get_indexes(table),
            ]
            tables[table] = {str(rule["name"]) for rule in named if rule["name"]}
        return tables

    async with alone(url) as connection:
        return await connection.run_sync(look)


def wanted(sqlite: bool) -> dict[str, set[str]]:
    tables: dict[str, set[str]] = {}
    for table in metadata.tables.values():
        names = {str(rule.name) for rule in table.constraints}
        names |= {str(index.name) for index in table.indexes}
        numbered = table.dialect_options["sqlite"]["autoincrement"]
        if sqlite and numbered:
            # A key that SQLite numbers is part of its column, and has no name there.
            names.discard(f"pk_{table.name}")
        tables[table.name] = names
    return tables


async def test_up_down_and_up_again(url: str) -> None:
    sqlite = url.startswith("sqlite")
    assert await upgrade(url) == Climb(None, ReleaseSchema().head)
    first = await seen(url)
    version = first.pop("alembic_version")
    assert version == {"alembic_version_pkc"}
    assert first == wanted(sqlite)

    await migrate(url, "base")
    assert (await seen(url)).keys() == {"alembic_version"}
    with pytest.raises(SchemaBehind):
        await check(url)

    head = ReleaseSchema().head
    assert await upgrade(url) == Climb(None, head)
    assert await upgrade(url) == Climb(head, head)
    assert await check(url) == Standing(head, head)
    again = await seen(url)
    assert again == first | {"alembic_version": version}


async def test_the_tables_are_what_the_program_thinks(url: str) -> None:
    await upgrade(url)

    def difference(connection: Connection) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with alone(url) as connection:
        assert await connection.run_sync(difference) == []


async def test_upgrading_twice_changes_nothing(url: str, tmp_path: Path) -> None:
    ledger = await Ledger.open(url, clock=SetClock(), migrate=True)
    await with_engine(ledger)
    given = await accept(ledger, order())
    await ledger.close()
    await upgrade(url)
    again = await Ledger.open(url, clock=SetClock(), migrate=True)
    try:
        assert again.identity == ledger.identity
        assert await again.operations.get(given.id) == given
    finally:
        await again.close()


async def test_a_newer_schema_is_told_from_an_older_one(url: str) -> None:
    await upgrade(url)
    async with alone(url) as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        await connection.execute(text("UPDATE ledger SET compatible_from = '9998'"))
        await connection.commit()
    for attempt in (
        check(url),
        upgrade(url),
        Ledger.open(url, clock=SetClock()),
        Ledger.open(url, clock=SetClock(), migrate=True),
    ):
        with pytest.raises(SchemaAhead, match=r"9999.*newer"):
            await attempt

    async with alone(url) as connection:
        await connection.execute(text("DELETE FROM alembic_version"))
        await connection.commit()
    for behind in (check(url), Ledger.open(url, clock=SetClock())):
        with pytest.raises(SchemaBehind, match="this release has"):
            await behind


async def test_a_check_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(SchemaBehind):
        await check(f"sqlite:///{tmp_path}/ledger.db")
    assert os.listdir(tmp_path) == []


async def test_replicas_that_start_together_upgrade_once(postgres_url: str) -> None:
    ledgers = await asyncio.gather(
        *(Ledger.open(postgres_url, clock=SetClock(), migrate=True) for _ in range(5))
    )
    assert len({ledger.identity for ledger in ledgers}) == 1
    for ledger in ledgers:
        await ledger.close()


async def test_an_upgrade_that_takes_too_long_elsewhere_is_said_so(postgres_url: str) -> None:
    async with alone(postgres_url):
        with pytest.raises(UpgradeBusy):
            await upgrade(postgres_url, patience_s=0.0)
    await upgrade(postgres_url, patience_s=0.0)


# ---- as installed ----


LONGER_TABLE = """
    with op.batch_alter_table("engines") as engines:
        engines.add_column(sa.Column("notes", sa.Text))
        engines.alter_column("dialect", nullable=True)
"""
BROKEN = """
    op.create_table("half", sa.Column("id", sa.Integer, primary_key=True))
    op.execute("UPDATE ledger SET identity = 'changed'")
    op.execute("SELECT no_such_column FROM ledger")
"""
ORPHANS = """
    with op.batch_alter_table("engines") as engines:
        engines.add_column(sa.Column("notes", sa.Text))
    op.execute("DELETE FROM engines")
"""


async def test_an_installed_package_brings_its_migrations(url: str, tmp_path: Path) -> None:
    folder = installed(tmp_path / "site")
    done = run(folder, UPGRADE, url, str(folder))
    assert done.stdout.strip() == ReleaseSchema().head, done.stderr
    assert (await check(url)).revision == ReleaseSchema().head


async def test_the_next_release_and_this_one(url: str, tmp_path: Path) -> None:
    """A later migration makes a table again, with rows that others refer to. It does not say that
    older releases may use what it leaves behind, so this one does not."""
    ledger = await Ledger.open(url, clock=SetClock(), migrate=True)
    await with_engine(ledger)
    await accept(ledger, order())
    await ledger.close()
    before = await seen(url)

    folder = installed(tmp_path / "site", LONGER_TABLE)
    done = run(folder, UPGRADE, url, str(folder))
    assert done.stdout.strip() == next_revision(), done.stderr
    with pytest.raises(SchemaAhead):
        await check(url)
    assert await seen(url) == before, "every constraint kept its name"
    async with alone(url) as connection:
        count = await connection.execute(text("SELECT count(*), count(notes) FROM engines"))
        assert tuple(count.one()) == (1, 0)
        orders = await connection.execute(text("SELECT count(*) FROM operations"))
        assert orders.scalar_one() == 1


@pytest.mark.parametrize("body", [BROKEN, ORPHANS], ids=["broken", "orphans"])
async def test_a_migration_that_fails_has_not_been(url: str, tmp_path: Path, body: str) -> None:
    ledger = await Ledger.open(url, clock=SetClock(), migrate=True)
    await with_engine(ledger)
    await accept(ledger, order())
    await ledger.close()
    before = await seen(url)
    folder = installed(tmp_path / "site", body)
    assert run(folder, UPGRADE, url, str(folder)).returncode != 0
    assert (await check(url)).revision == ReleaseSchema().head
    assert await seen(url) == before
    again = await Ledger.open(url, clock=SetClock())
    try:
        assert again.identity == ledger.identity
        assert len(await again.operations.open_ones()) == 1
    finally:
        await again.close()


def test_alembic_by_hand_in_a_checkout(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"

    def alembic(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "alembic", *arguments],
            cwd=ROOT,
            env={**os.environ, **more},
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert alembic("upgrade", "head", CHADBURN_DATABASE_URL=url).returncode == 0
    assert asyncio.run(check(url)).revision == ReleaseSchema().head
    assert alembic("-x", f"url={url}", "check").returncode == 0
    assert alembic("-x", f"url={url}", "downgrade", "base").returncode == 0
    with pytest.raises(SchemaBehind):
        asyncio.run(check(url))
    unnamed = alembic("upgrade", "head", CHADBURN_DATABASE_URL="")
    assert unnamed.returncode != 0
    assert "name the database" in unnamed.stderr
    assert "no --sql" in alembic("upgrade", "head", "--sql", CHADBURN_DATABASE_URL=url).stderr


def test_a_password_is_not_said_aloud() -> None:
    with pytest.raises(LedgerUnavailable) as failed:
        asyncio.run(upgrade("postgresql+psycopg://u:hunter2@127.0.0.1:1/none"))
    error: BaseException | None = failed.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__cause__
