"""Releases with other migrations than this one's, and moving a database between schemas."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from alembic import command
from alembic.script import ScriptDirectory
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


def in_order(schema: ReleaseSchema) -> list[str]:
    """All revisions of the release, as they are applied; their numbers may be in another order."""
    scripts = ScriptDirectory.from_config(schema.config)
    return [script.revision for script in scripts.walk_revisions()][::-1]


def next_revision() -> str:
    """Above every number that is in use, whatever order they are applied in."""
    files = (ROOT / "migrations" / "versions").glob("[0-9]*.py")
    return f"{max(int(file.name[:4]) for file in files) + 1:04}"


def installed(folder: Path, *migrations: str, compatible_from: str | None = None) -> Path:
    """The package as a wheel lays it out, with more migrations than this release has."""
    without = shutil.ignore_patterns("__pycache__", "reference_engine", "rpc")
    shutil.copytree(ROOT / "app", folder / "app", ignore=without)
    shutil.copytree(ROOT / "migrations", folder / "app" / "_migrations", ignore=without)
    stated = compatible_from or next_revision()
    down = ReleaseSchema().head
    for number, body in enumerate(migrations, start=int(next_revision())):
        (folder / "app" / "_migrations" / "versions" / f"{number:04}_more.py").write_text(
            "import sqlalchemy as sa\nfrom alembic import op\n"
            f'revision, down_revision = "{number:04}", "{down}"\n'
            f"compatible_from = {stated!r}\n"
            f"def upgrade() -> None:\n{body}\n"
        )
        down = f"{number:04}"
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
