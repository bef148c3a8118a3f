"""Fifty clients who order at once, of a gateway whose ledger is one SQLite file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.robustness.bed import Bed, bed
from tests.robustness.history import Answered, LedgerOperation, Unanswered

pytestmark = pytest.mark.anyio

WRITERS = 50
ENGINES = ("e1", "e2", "e3")


async def write(made: Bed, number: int, operations: int) -> None:
    """Orders that run beside each other, so that nothing but the ledger makes them wait."""
    clients = made.clients
    engine = ENGINES[number % len(ENGINES)]
    for turn in range(operations):
        body = {"request_ids": [f"request-{number}-{turn}"]}
        found = await clients.order(engine, "abort-requests", body, kind="abort_requests")
        assert found is not None
        await clients.hear(f"of-{found}", operation=found)
        await clients.ended(found)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("operations", [2, pytest.param(20, marks=pytest.mark.long)])
async def test_fifty_writers_on_sqlite(tmp_path: Path, operations: int) -> None:
    name = f"writers-{WRITERS}x{operations}"
    async with bed(tmp_path, name, seed=operations, engines=ENGINES) as made:
        await asyncio.gather(*(write(made, number, operations) for number in range(WRITERS)))
        history = await made.history()
        said = await asyncio.to_thread((tmp_path / "gateway.log").read_text)
    assert "database is locked" not in said
    assert [each for each in history.all(Answered) if each.status >= 500] == []
    assert list(history.all(Unanswered)) == []
    rows = list(history.all(LedgerOperation))
    assert len(rows) == WRITERS * operations
    assert {each.state for each in rows} == {"succeeded"}
