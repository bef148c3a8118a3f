"""Releases with other migrations than this one's, and moving a database between schemas."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from alembic import command
from sqlalchemy import Connection

from app.ledger.schema import ReleaseSchema, alone

ROOT = Path(__file__).parents[2]


async def migrate(url: str, to: str) -> None:
    """Up to a revision, or down to `base`, as the command line of Alembic would."""
    schema = ReleaseSchema()

    def move(connection: Connection) -> None:
        schema.config.attributes["connection"] = connection
        (command.downgrade if to == "base" else command.upgrade)(schema.config, to)

    async with alone(url) as connection:
        await connection.run_sync(move)


def next_revision() -> str:
    return f"{int(ReleaseSchema().head) + 1:04}"


def installed(folder: Path, *migrations: str, compatible_from: str | None = None) -> Path:
    """The package as a wheel lays it out, with more migrations than this release has."""
    without = shutil.ignore_patterns("__pycache__", "reference_engine", "rpc")
    shutil.copytree(ROOT / "app", folder / "app", ignore=without)
    shutil.copytree(ROOT / "migrations", folder / "app" / "_migrations", ignore=without)
    released = len(list((ROOT / "migrations" / "versions").glob("[0-9]*.py")))
    stated = compatible_from or next_revision()
    for number, body in enumerate(migrations, start=released + 1):
        (folder / "app" / "_migrations" / "versions" / f"{number:04}_more.py").write_text(
            "import sqlalchemy as sa\nfrom alembic import op\n"
            f'revision, down_revision = "{number:04}", "{number - 1:04}"\n'
            f"compatible_from = {stated!r}\n"
            f"def upgrade() -> None:\n{body}\n"
        )
    return folder


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


UPGRADE = """
import asyncio, sys
import app.ledger
assert app.__file__.startswith(sys.argv[2]), app.__file__
print(asyncio.run(app.ledger.upgrade(sys.argv[1])).after)
"""
