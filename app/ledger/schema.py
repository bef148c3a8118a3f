"""Bringing the database to the schema of this release, and telling whether it is there."""

from __future__ import annotations


async def upgrade(url: str) -> str:
    """Bring the database to the newest schema and return its revision. Creates what is missing.

    Raises SchemaAhead, LedgerInUse (SQLite, another process has it), UpgradeBusy (PostgreSQL,
    another process is upgrading and takes longer than a minute), LedgerUnavailable.
    """
    raise NotImplementedError


async def check(url: str) -> str:
    """The revision of the database, which is this release's.

    Raises SchemaBehind, SchemaAhead, LedgerUnavailable. Takes no lock and changes nothing.
    """
    raise NotImplementedError
