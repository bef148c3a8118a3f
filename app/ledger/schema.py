"""Bringing the database to the schema of this release, and telling whether it can be used.

A release uses a schema other than its own in two cases, so that gateways can be replaced one by
one while others go on (docs/adr/0009):

- a **newer** one, if the database says that it is compatible from a revision that the release
  knows. Each migration states as `compatible_from` the oldest revision whose releases may use what
  it leaves behind; one that states nothing fits only releases that have it.
- an **older** one, down to `NEEDS`: what this release's statements take for granted.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

import app
from app.ledger.connections import for_writing, make_engine
from app.ledger.database import Statements, database_errors
from app.ledger.errors import LedgerInUse, SchemaAhead, SchemaBehind, UpgradeBusy
from app.ledger.target import Target, sole_process, target_of

NEEDS = "0011"
"""The oldest revision that this release works on. A migration whose tables or columns the program
names in its statements raises it."""

_UPGRADE_PATIENCE_S = 60.0
_RETRY_S = 0.1
_REVISION = text("SELECT version_num FROM alembic_version")
_COMPATIBLE_FROM = text("SELECT compatible_from FROM ledger")
_STATE_COMPATIBILITY = text("UPDATE ledger SET compatible_from = :stated")
_NEW_IDENTITY = text("UPDATE ledger SET identity = :identity")
# Those that have been ended since the backup was made would be there again.
_NO_SESSIONS = text("DELETE FROM browser_sessions")
# Two keys of 32 bits: another kind of advisory lock than those of `positions`.
_TRY_LOCK = text("SELECT pg_try_advisory_lock(1128414562, 1)")
_UNLOCK = text("SELECT pg_advisory_unlock(1128414562, 1)")
# Every open ledger shares this one, see `watch`.
_TRY_ALONE = text("SELECT pg_try_advisory_xact_lock(1128414562, 3)")


@dataclass(frozen=True, slots=True)
class Climb:
    """`before`: the revision that was found, None: there was none. `after`: the one it is now;
    a newer one than this release's, if that may stay."""

    before: str | None
    after: str


@dataclass(frozen=True, slots=True)
class Standing:
    """A schema that can be used. `revision`: the database's; `head`: the one of this release."""

    revision: str
    head: str


async def upgrade(
    url: str, *, patience_s: float = _UPGRADE_PATIENCE_S, restored: bool = False
) -> Climb:
    """Bring the database to the newest schema that this release has. Creates what is missing.

    `restored`: it comes from a backup, and gets a new identity (see docs/adr/0005); the browser
    sessions in it are over.

    Raises SchemaAhead, LedgerInUse (another process has it; on PostgreSQL only if `restored`),
    UpgradeBusy (PostgreSQL, another process is upgrading and takes longer than `patience_s`),
    LedgerUnavailable.
    """
    target = target_of(url)
    with sole_process(target):
        climb = await bring_up(target, patience_s)
        if restored:
            async with _alone(target, patience_s) as connection:
                if target.path is None and not (await connection.execute(_TRY_ALONE)).scalar_one():
                    raise LedgerInUse("another process has this ledger open, such as a gateway")
                await connection.execute(_NEW_IDENTITY, {"identity": secrets.token_hex(4)})
                await connection.execute(_NO_SESSIONS)
                await connection.commit()
        return climb


async def check(url: str) -> Standing:
    """Which schema the database has.

    Raises SchemaBehind, SchemaAhead, LedgerUnavailable. Takes no lock and changes nothing.
    """
    async with looking(url) as (_, standing):
        return standing


@asynccontextmanager
async def looking(url: str) -> AsyncIterator[tuple[AsyncConnection, Standing]]:
    """A connection to a ledger that can be used, for reading in it while others do as they like.

    Raises SchemaBehind, SchemaAhead, LedgerUnavailable.
    """
    target = target_of(url)
    target.require()
    engine = make_engine(target)
    try:
        with database_errors():
            async with engine.connect() as connection:
                yield connection, await check_connection(connection, await release_schema())
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

    def at_least(self, revision: str, needed: str) -> bool:
        """Of two that are known: whether `needed` is `revision` or came before it."""
        down = self._scripts.iterate_revisions(revision, "base")
        return any(script.revision == needed for script in down)

    def compatible_from(self, revision: str) -> str:
        """What the migration says of the schema that it leaves behind."""
        stated: str = getattr(
            self._scripts.get_revision(revision).module, "compatible_from", revision
        )
        return stated

    def judge(self, current: str | None, compatible_from: str | None) -> Standing:
        """`compatible_from`: what the database says of itself.

        Raises SchemaBehind or SchemaAhead.
        """
        if current is None:
            raise SchemaBehind(
                f"the ledger's schema is not there yet, this release has {self.head}"
            )
        if self.knows(current):
            if current == self.head or self.at_least(current, NEEDS):
                return Standing(current, self.head)
            raise SchemaBehind(
                f"the ledger's schema is {current}, this release needs {NEEDS} at least"
            )
        if compatible_from is not None and self.knows(compatible_from):
            return Standing(current, self.head)
        raise SchemaAhead(
            f"the ledger's schema ({current}) is newer than this release, which knows it up "
            f"to {self.head}: run the newer release"
        )


def _migrations() -> Path:
    """In an installed wheel they are part of the package, in a checkout they lie beside it."""
    package = Path(app.__file__).parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


async def release_schema() -> ReleaseSchema:
    """Reads and imports the migration files, which is not for the event loop's thread."""
    return await asyncio.to_thread(ReleaseSchema)


async def check_connection(connection: Statements, schema: ReleaseSchema) -> Standing:
    """Raises SchemaBehind or SchemaAhead."""
    current = await connection.run_sync(_current)
    stated = None
    if current is not None and not schema.knows(current):
        stated = await connection.run_sync(_stated)
    return schema.judge(current, stated)


def _current(connection: Connection) -> str | None:
    # Not by Alembic's own means, which log every look; readiness is asked for all the time.
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(_REVISION).scalar_one_or_none()
    return revision


def _stated(connection: Connection) -> str | None:
    stated: str | None = None
    if _says(connection):
        stated = connection.execute(_COMPATIBLE_FROM).scalar_one_or_none()
    return stated


def _says(connection: Connection) -> bool:
    inspector = inspect(connection)
    return inspector.has_table("ledger") and any(
        column["name"] == "compatible_from" for column in inspector.get_columns("ledger")
    )


def note_compatibility(connection: Connection) -> None:
    """At the end of every migration, in its transaction: write down which older releases may use
    what is there now."""
    current = _current(connection)
    if current is not None and _says(connection):
        stated = ReleaseSchema().compatible_from(current)
        connection.execute(_STATE_COMPATIBILITY, {"stated": stated})


async def bring_up(target: Target, patience_s: float = _UPGRADE_PATIENCE_S) -> Climb:
    """`upgrade` for a process that already has the SQLite file for itself."""
    schema = await release_schema()

    def climb(connection: Connection) -> None:
        schema.config.attributes["connection"] = connection
        command.upgrade(schema.config, "head")

    async with _alone(target, patience_s) as connection:
        current = await connection.run_sync(_current)
        if current is not None and not schema.knows(current):
            await check_connection(connection, schema)
            return Climb(current, current)
        # Alembic has to find the connection outside a transaction to begin one itself.
        await connection.rollback()
        if current != schema.head:
            await connection.run_sync(climb)
        return Climb(current, schema.head)


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
