"""A ledger on SQLite that nobody has used. To make one anew takes all migrations, which cost more
than most tests; so it is made once for each process and copied."""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from pathlib import Path

from app.ledger import upgrade


@cache
def _content() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        asyncio.run(upgrade(f"sqlite:///{path}"))
        return path.read_bytes()


async def place_empty_ledger(path: Path) -> None:
    """Where there is none yet, with its folder."""
    await asyncio.to_thread(_place, path)


def _place(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(0o600)
        path.write_bytes(_content())
