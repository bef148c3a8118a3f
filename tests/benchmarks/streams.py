"""Reads beside many open event streams, on a small pool of connections."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

from tests.benchmarks.figures import Figure, milliseconds, percentile
from tests.http.gateway import Gateway, gateway
from tests.streams.reading import watching

STREAMS, POOL, READS = 200, 5, 300
AIM_S = 0.1
_HOW = (
    f"{STREAMS} streams of everything on a gateway with {POOL} connections to PostgreSQL, orders "
    f"given all the while; {READS} GETs of an engine one after the other. Gateway, engine, "
    "readers and the client that measures are one process, so this is the worst of it."
)


async def reads_beside_streams(folder: Path, url: str) -> list[Figure]:
    here = gateway(folder, database_url=url, database_pool_size=POOL)
    async with here as gate, AsyncExitStack() as held:
        readers = [asyncio.create_task(_read(gate)) for _ in range(STREAMS)]
        held.callback(lambda: [reader.cancel() for reader in readers])
        while gate.rooms.streams.count < STREAMS:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.05)
        ordering = asyncio.create_task(_order(gate))
        held.callback(ordering.cancel)
        took = []
        for _ in range(READS):
            began = time.monotonic()
            answer = await gate.get("/v1/engines/e1")
            took.append(time.monotonic() - began)
            assert answer.status_code == 200
    typical, late = percentile(took, 0.5), percentile(took, 0.95)
    return [
        Figure(
            f"GET engine beside {STREAMS} event streams, median (95 %)",
            f"{milliseconds(typical)} ({milliseconds(late)})",
            aim=f"median under {milliseconds(AIM_S)}",
            met=typical < AIM_S,
            how=_HOW,
        )
    ]


async def _read(gate: Gateway) -> None:
    async with watching(gate, "/v1/events", timeout_s=300.0) as reader:
        async for _ in reader:
            pass


async def _order(gate: Gateway) -> None:
    while True:
        await gate.order("flush-caches", {"caches": ["prefix"]}, {"Prefer": "wait=20"})
        await asyncio.sleep(0.2)
