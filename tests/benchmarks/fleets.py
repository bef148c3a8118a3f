"""A gateway that watches a thousand engines, and what a start costs."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from tests.benchmarks.costs import ordering
from tests.benchmarks.figures import Figure, megabytes, percentile
from tests.benchmarks.gateways import Plant, plant, resident_bytes
from tests.benchmarks.wire import load

ENGINES, CLIENTS, IDLE_S = 1_000, 8, 20.0
STARTS = 5
SLOW = "slow"
_WATCHED = (
    f"{ENGINES} engines, doubles in another process, each with a connection of its own, are "
    f"watched for {IDLE_S:g} s with nobody asking. The age of facts is the oldest on the list of "
    "engines, read five times."
)
_ORDERED = (
    f"An order to each of the {ENGINES} engines, over {CLIENTS} connections, and before them one "
    "to an engine that takes 10 s for it. From the first request to the last answer, and to the "
    "last of them written down as sent."
)
_STARTED = (
    f"`chadburn serve` on a ledger that is there, from its process to its ready file; the middle "
    f"one of {STARTS}. Memory: resident once it is ready."
)
_DISPATCHED = re.compile(r"^event: ?dispatched", re.MULTILINE)


async def figures(folder: Path) -> list[Figure]:
    found: list[Figure] = []
    async with plant(folder, engines=ENGINES) as made:
        found += await _starts(made)
        await made.register_all()
        await asyncio.sleep(5.0)
        found += await _watched(made)
        found += await _ordered(made)
    return found


async def _starts(made: Plant) -> list[Figure]:
    took: list[float] = []
    for _ in range(STARTS):
        made.gateway.stop()
        made.ready_file.unlink()
        began = time.perf_counter()
        made.gateway.start()
        while not made.ready_file.exists():
            assert made.gateway.running, made.gateway.said()
            await asyncio.sleep(0.005)
        took.append(time.perf_counter() - began)
    made.found_again()
    memory, middle = resident_bytes(made.gateway.pid), percentile(took, 0.5)
    return [
        Figure(
            "start of the gateway, until it is ready", f"{middle:.2f} s", aim="≤ 1.5 s",
            met=middle <= 1.5, how=_STARTED,
        ),
        Figure(
            "memory of a gateway that has just started", megabytes(memory), aim="≤ 120 MB",
            met=memory <= 120e6, how=_STARTED,
        ),
    ]  # fmt: skip


async def _watched(made: Plant) -> list[Figure]:
    before = made.cpu_s()
    await asyncio.sleep(IDLE_S)
    share = (made.cpu_s() - before) / IDLE_S
    ages = [await _oldest_s(made) for _ in range(5)]
    memory = resident_bytes(made.gateway.pid)
    what = f"{ENGINES} engines watched"
    return [
        Figure(
            f"{what}: processor time", f"{share * 100:.0f} % of a core", aim="≤ 10 %",
            met=share <= 0.1, how=_WATCHED,
        ),
        Figure(
            f"{what}: memory", megabytes(memory), aim="≤ 200 MB", met=memory <= 200e6,
            how=_WATCHED,
        ),
        Figure(
            f"{what}: age of the oldest facts", f"{max(ages):.1f} s", aim="≤ 15.0 s",
            met=max(ages) <= 15.0, how=_WATCHED,
        ),
    ]  # fmt: skip


async def _oldest_s(made: Plant) -> float:
    oldest, path = 0.0, "/v1/engines?page_size=200"
    async with made.client() as client:
        while path:
            page = (await client.get(path)).json()
            now = datetime.now(UTC)
            for one in page["items"]:
                at = datetime.fromisoformat(one["health"]["observed_at"])
                oldest = max(oldest, (now - at).total_seconds())
            token = page["next_page_token"]
            path = f"/v1/engines?page_size=200&page_token={token}" if token else ""
    await asyncio.sleep(1.0)
    return oldest


async def _ordered(made: Plant) -> list[Figure]:
    await made.register(SLOW, made.slow_address)
    async with made.client() as client, client.stream("GET", "/v1/events") as events:
        hearing = asyncio.create_task(_hear(events, ENGINES + 1))
        await asyncio.sleep(2.0)
        began = time.perf_counter()
        slow = await client.post(
            f"/v1/engines/{SLOW}/abort-requests",
            json={"all": True},
            headers={"idempotency-key": "the-slow-one"},
        )
        assert slow.status_code == 202, slow.text
        await load(made.url, ordering(made), connections=CLIENTS, most=ENGINES)
        taken = time.perf_counter() - began
        sent = await hearing - began
    return [
        Figure(
            f"an order to each of {ENGINES} engines, beside a slow one: taken on; sent",
            f"{taken:.1f} s; {sent:.1f} s", aim="≤ 3.0 s", met=sent <= 3.0, how=_ORDERED,
        )
    ]  # fmt: skip


async def _hear(events: httpx2.Response, count: int) -> float:
    """When the last of so many was said to be sent."""
    heard = 0
    async for line in events.aiter_lines():
        heard += _DISPATCHED.match(line) is not None
        if heard == count:
            break
    return time.perf_counter()
