"""Two hundred open streams on PostgreSQL, with a pool of five connections."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest

from app.clock import SystemClock
from app.domain.operation import Progress
from app.domain.transitions import Advanced, Progressed, advance
from app.ledger.ledger import Ledger
from tests.http.gateway import gateway
from tests.streams.reading import first, watching

pytestmark = pytest.mark.anyio

STREAMS, EVENTS, MOST_OF_STREAMS = 200, 40, 2
READ_S = 1.0  # ten times what a read may take beside them
ON_EVENTS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'
  AND query LIKE '%FROM events%'
"""


async def test_streams_use_two_connections_and_reads_go_on(
    tmp_path: Path, postgres_url: str
) -> None:
    here = gateway(tmp_path / "data", database_url=postgres_url, database_pool_size=5)
    async with here as gate, AsyncExitStack() as held:
        gate.engine.go.clear()
        operation_id = (await gate.order("pause", {"mode": "drain"})).json()["id"]
        path = f"/v1/operations/{operation_id}/events"
        await first(gate, path, 3)
        heard = asyncio.Semaphore(0)

        async def read() -> None:
            async with watching(gate, path) as reader:
                async for event in reader:
                    if event.type == "progress":
                        heard.release()

        readers = [asyncio.create_task(read()) for _ in range(STREAMS)]
        async with asyncio.timeout(120):
            while gate.rooms.streams.count < STREAMS:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.05)
        used: list[int] = []
        watching_them = asyncio.create_task(sample(postgres_url, used))
        took: list[float] = []
        # Written from elsewhere, so that the pool is the streams' and the reads' alone.
        other = await Ledger.open(postgres_url, clock=SystemClock())
        held.push_async_callback(other.close)
        operation = await other.operations.get(operation_id)
        assert operation is not None
        for number in range(EVENTS):
            step = advance(
                operation, Progressed(progress=Progress("p", done=number)), SystemClock().now()
            )
            assert isinstance(step, Advanced)
            operation = await other.operations.record(operation, step)
            began = time.monotonic()
            assert (await gate.get("/v1/operations")).status_code == 200
            took.append(time.monotonic() - began)
        async with asyncio.timeout(120):
            for _ in range(STREAMS * EVENTS):
                await heard.acquire()
        watching_them.cancel()
        assert gate.rooms.streams.count == STREAMS
        assert used, "nothing was seen of the streams"
        assert max(used) <= MOST_OF_STREAMS
        assert gate.rooms.ledger.pool_in_use() <= MOST_OF_STREAMS
        assert statistics.median(took) < READ_S
        gate.engine.go.set()
        await gate.http.post(f"/v1/operations/{operation_id}/cancel", headers=gate.auth())
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, watching_them, return_exceptions=True)


async def sample(url: str, used: list[int]) -> None:
    """How many connections read events, over and over."""
    plain = url.replace("postgresql+psycopg", "postgresql")
    async with await psycopg.AsyncConnection.connect(plain, autocommit=True) as connection:
        while True:
            row = await (await connection.execute(ON_EVENTS)).fetchone()
            assert row is not None
            used.append(int(row[0]))
            await asyncio.sleep(0.01)
