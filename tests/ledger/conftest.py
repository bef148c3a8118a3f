"""Every test that asks for `ledger` or `ledger_url` runs on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.ledger import Ledger
from tests.doubles.empty_ledger import place_empty_ledger
from tests.ledger.samples import SetClock


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database."""
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        return url
    return f"sqlite+aiosqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def ledger(ledger_url: str, clock: SetClock) -> AsyncIterator[Ledger]:
    if not ledger_url.startswith("postgresql"):
        await place_empty_ledger(Path(ledger_url.partition(":///")[2]))
    opened = await Ledger.open(ledger_url, clock=clock, migrate=True)
    try:
        yield opened
    finally:
        await opened.close()
