"""Bringing the database to the schema of this release, and telling whether it is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

import app
from app.ledger.database import database_errors, for_writing, make_engine
from app.ledger.errors import SchemaAhead, SchemaBehind, UpgradeBusy
from app.ledger.target import Target, sole_process, target_of

_UPGRADE_PATIENCE_S = 60.0
_RETRY_S = 0.1
_REVISION = text("SELECT version_num FROM alembic_version")
# Two keys of 32 bits: another kind of advisory lock than those of `positions`.
_TRY_LOCK = text("SELECT pg_try_advisory_lock(1128414562, 1)")
_UNLOCK = text("SELECT pg_advisory_unlock(1128414562, 1)")


async def upgrade(url: str, *, patience_s: float = _UPGRADE_PATIENCE_S) -> str:
    """Bring the database to the newest schema and return its revision. Creates what is missing.

    Raises SchemaAhead, LedgerInUse (SQLite, another process has it), UpgradeBusy (PostgreSQL,
    another process is upgrading and takes longer than `patience_s`), LedgerUnavailable.
    """
    target = target_of(url)
    with sole_process(target):
        return await bring_up(target, patience_s)


async def check(url: str) -> str:
    """The revision of the database, which is this release's.

    Raises SchemaBehind, SchemaAhead, LedgerUnavailable. Takes no lock and changes nothing.
    """
    target = target_of(url)
    if target.path is not None and not target.path.exists():
        # To connect would create it.
        raise SchemaBehind("there is no ledger there yet")
    engine = make_engine(target)
    try:
        with database_errors():
            async with engine.connect() as connection:
                return await check_connection(connection, await release_schema())
    finally:
        await engine.dispose()


class ReleaseSchema:
    """The migrations that came with this release."""

    def __init__(self) -> None:
        self.config = Config()
        # Alembic reads the option as a ConfigParser does, where a percent sign is special.
        self.config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
        self.config.set_main_option("path_separator", "os")
        self._scripts = ScriptDirectory.from_config(self.config)
        head = self._scripts.get_current_head()
        assert head is not None, "a release has at least one migration"
        self.head = head

    def knows(self, revision: str) -> bool:
        try:
            return self._scripts.get_revision(revision) is not None
        except CommandError:
            return False

    def judge(self, current: str | None) -> str:
        """The revision itself if it is this release's. Raises SchemaBehind or SchemaAhead."""
        if current == self.head:
            return self.head
        if current is not None and not self.knows(current):
            raise SchemaAhead(
                f"the ledger's schema ({current}) is newer than this release, which knows it up "
                f"to {self.head}: run the newer release"
            )
        raise SchemaBehind(
            f"the ledger's schema is {current or 'not there yet'}, this release needs {self.head}"
        )


def _migrations() -> Path:
    """In an installed wheel they are part of the package, in a checkout they lie beside it."""
    package = Path(app.__file__).parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


async def release_schema() -> ReleaseSchema:
    """Reads and imports the migration files, which is not for the event loop's thread."""
    return await asyncio.to_thread(ReleaseSchema)


async def check_connection(connection: AsyncConnection, schema: ReleaseSchema) -> str:
    """Raises SchemaBehind or SchemaAhead."""
    return schema.judge(await connection.run_sync(_current))


def _current(connection: Connection) -> str | None:
    # Not by Alembic's own means, which log every look; readiness is asked for all the time.
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(_REVISION).scalar_one_or_none()
    return revision


async def bring_up(target: Target, patience_s: float = _UPGRADE_PATIENCE_S) -> str:
    """`upgrade` for a process that already has the SQLite file for itself."""
    schema = await release_schema()

    def climb(connection: Connection) -> None:
        schema.config.attributes["connection"] = connection
        command.upgrade(schema.config, "head")

    async with _alone(target, patience_s) as connection:
        current = await connection.run_sync(_current)
        # Alembic has to find the connection outside a transaction to begin one itself.
        await connection.rollback()
        if current is not None and not schema.knows(current):
            schema.judge(current)
        if current != schema.head:
            await connection.run_sync(climb)
        return schema.head


@asynccontextmanager
async def alone(url: str) -> AsyncIterator[AsyncConnection]:
    """A connection for migrations, while no other process migrates this database."""
    target = target_of(url)
    with sole_process(target):
        async with _alone(target, _UPGRADE_PATIENCE_S) as connection:
            yield connection


@asynccontextmanager
async def _alone(target: Target, patience_s: float) -> AsyncIterator[AsyncConnection]:
    engine = for_writing(make_engine(target, migrating=True))
    try:
        with database_errors():
            async with engine.connect() as connection:
                if target.path is not None:
                    yield connection
                    return
                async with _upgrade_lock(engine, patience_s):
                    yield connection
    finally:
        await engine.dispose()


@asynccontextmanager
async def _upgrade_lock(engine: AsyncEngine, patience_s: float) -> AsyncIterator[None]:
    """Replicas that start together upgrade one after the other, and the later ones find nothing
    left to do.

    On a connection of its own and outside any transaction, and by asking again rather than by
    waiting in the database: an index that is built concurrently waits for every transaction that
    is older, also for one that waits for this lock.
    """
    async with engine.connect() as plain:
        keeper = await plain.execution_options(isolation_level="AUTOCOMMIT")
        until = time.monotonic() + patience_s
        while not (await keeper.execute(_TRY_LOCK)).scalar_one():
            if time.monotonic() > until:
                raise UpgradeBusy("another process is upgrading the ledger and has not finished")
            await asyncio.sleep(_RETRY_S)
        try:
            yield
        finally:
            await keeper.execute(_UNLOCK)
