"""Proofs are forgotten once they are too old to be shown again."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.clock import SystemClock
from app.ledger import Ledger
from app.operations.retention import keep_proofs_short

pytestmark = pytest.mark.anyio


async def test_old_proofs_go_and_young_ones_stay(tmp_path: Path) -> None:
    ledger = await Ledger.open(
        f"sqlite+aiosqlite:///{tmp_path}/ledger.db", clock=SystemClock(), migrate=True
    )
    try:
        now = datetime.now(UTC)
        await ledger.proofs.first_use("old", now - timedelta(seconds=1))
        await ledger.proofs.first_use("young", now + timedelta(hours=1))
        await keep_proofs_short(ledger, in_use=False)  # once, and it ends
        assert await ledger.proofs.first_use("old", now - timedelta(seconds=1))
        assert not await ledger.proofs.first_use("young", now)
        keeping = asyncio.create_task(keep_proofs_short(ledger, in_use=True, every_s=0.01))
        async with asyncio.timeout(30):
            await ledger.proofs.first_use("again", now)
            while not await ledger.proofs.first_use("again", now):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    finally:
        await ledger.close()
