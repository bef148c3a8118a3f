"""Two gateways on one PostgreSQL and one chain: who seals is frozen, wakes up late, is killed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.ledger.chain import verify
from tests.robustness.replicas import Replica, Replicas, replicas, until

pytestmark = [pytest.mark.anyio, pytest.mark.long]


def sealing(fleet: Replicas, *, but: Replica | None = None) -> Replica | None:
    """Who has the duty now. None: nobody, or `but`."""
    with fleet.connection() as connection:
        found = connection.execute("SELECT owner FROM duties").fetchone()
    pid = found[0].split(":")[1] if found and found[0] else None
    running = (each for each in fleet.all if each is not but and each.process.running)
    return next((each for each in running if str(each.process.pid) == pid), None)


def sealed_since(fleet: Replicas, moment: datetime) -> bool:
    with fleet.connection() as connection:
        query = "SELECT count(*) FROM audit_seals WHERE sealed_at > %s"
        found = connection.execute(query, (moment,)).fetchone()
    return found is not None and found[0] > 0


async def taken_over(fleet: Replicas, *, but: Replica) -> Replica:
    await until(lambda: sealing(fleet, but=but))
    found = sealing(fleet, but=but)
    assert found is not None
    return found


async def asking(replica: Replica, done: asyncio.Event) -> int:
    """Each look into the audit is an entry of it. How many were answered."""
    count = 0
    while not done.is_set():
        await replica.gateway.get("/v1/audit?page_size=1")
        count += 1
        await asyncio.sleep(0.02)
    return count


async def test_one_chain_whoever_seals_it(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, 2) as fleet:
        done = asyncio.Event()
        await until(lambda: sealing(fleet))
        first = sealing(fleet)
        assert first is not None
        second = fleet.peer(first)
        asked = asyncio.create_task(asking(second, done))

        await first.gateway.get("/v1/audit?page_size=1")  # it has its issuer's keys
        first.freeze()
        await taken_over(fleet, but=first)
        first.thaw()
        await first.gateway.get("/v1/audit?page_size=1")  # it is well again
        turns = datetime.now(UTC) + timedelta(seconds=4)  # of its own: one a second
        await until(lambda: sealed_since(fleet, turns))
        assert sealing(fleet) is second

        done.set()
        count = await asked
        second.process.kill()
        assert await taken_over(fleet, but=second) is first
        # The other one may have sealed all there was; this is a row that only this one can seal.
        await first.gateway.get("/v1/audit?page_size=1")
        await first.stop()

        verdict = await verify(postgres_url)
        assert verdict.broken is None
        assert verdict.unsealed.rows == 0, "it sealed the rest at its end"
        assert verdict.rows >= count + 1
        assert verdict.seals > 2
        assert verdict.head is not None
        assert verdict.head.fence >= 3
