"""Readers whose connections break again and again, while others write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.bed import bed
from tests.robustness.history import Connected, History, Opened
from tests.robustness.traffic import Traffic

pytestmark = pytest.mark.anyio

SEED = 5_021


def reconnects(history: History) -> int:
    """Connections that a reader came back on and was let in."""
    let_in = {each.connection for each in history.all(Connected) if each.status in (200, 204)}
    opened = [each for each in history.all(Opened) if each.connection in let_in]
    return len(opened) - len({each.reader for each in opened})


async def play(folder: Path, wanted: int, database_url: str | None) -> History:
    """Half the readers hear everything, half of them one engine, and each operation has its own;
    none of them has a connection for more than four events, and some for none."""
    kind = "sqlite" if database_url is None else "postgresql"
    name = f"reconnects-{kind}-{wanted}"
    async with bed(folder, name, SEED, database_url=database_url, delay_s=0.005) as made:
        chance = made.clients.chance
        traffic = Traffic(made, listeners=12, cut=lambda: chance.randint(0, 4))
        await traffic.begin()
        while reconnects(made.recorder.read()) < wanted:
            await traffic.more(4)
        await traffic.end()
        history = await made.history()
    assert reconnects(history) >= wanted
    return history


async def test_a_hundred_reconnects(tmp_path: Path) -> None:
    await play(tmp_path, 100, None)


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_a_thousand_reconnects(
    tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgres_url") if database == "postgresql" else None
    await play(tmp_path, 1000, url)
