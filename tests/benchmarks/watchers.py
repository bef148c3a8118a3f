"""Many open event streams on one gateway: how soon they hear, what they cost, and what is lost."""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from tests.benchmarks.bare_streams import bare_streams
from tests.benchmarks.costs import ordering
from tests.benchmarks.figures import Figure, milliseconds, percentile
from tests.benchmarks.gateways import HELD, cpu_s, plant, resident_bytes
from tests.benchmarks.wire import load

STREAMS, EVENTS, CLIENTS = 1_000, 100, 4
PACED, APART_S = 30, 0.25
IDLE = 5_000
AIM_S, AIM_RATE, AIM_BYTES = 0.25, 8_000, 40_000
_TIME = re.compile(rb'"time": ?"([^"]+)"')
_SETTINGS = f"""\
max_streams = {IDLE + 100}
max_streams_per_caller = {IDLE + 100}
max_connections = {IDLE + 500}
"""
_HEARD = (
    f"{STREAMS} streams of everything. {PACED} orders are taken on, {APART_S:g} s apart: how late "
    "their events are, from the moment that stands in an event, which is before its commit, to its "
    f"last byte at the reader. Then {EVENTS} more as fast as they are answered, {CLIENTS} at a "
    "time: what they cost. The readers share the machine's cores with the gateway. Beside it "
    "sse-starlette with a queue for each stream and no ledger, which is given as many."
)
_IDLE = f"{IDLE} streams of everything are opened, and nothing happens."


class Reader(asyncio.Protocol):
    """One stream: how many events it had, and how late each was."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        self.begun = False
        self.late_s: list[float] = []
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = datetime.now(UTC)
        if not self.begun:
            assert data.startswith(b"HTTP/1.1 200"), data
            self.begun = True
        whole, _, self._rest = (self._rest + data).rpartition(b"\n\n")
        for at in _TIME.findall(whole):
            moment = datetime.fromisoformat(at.decode())
            self.late_s.append((now - moment).total_seconds())

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended = True


async def figures(folder: Path) -> list[Figure]:
    _more_files(IDLE + 1_000)
    async with plant(folder, engines=8, command=HELD, more=_SETTINGS) as made:
        await made.register_all()
        lines = ["GET /v1/events HTTP/1.1", f"Host: {urlsplit(made.url).netloc}", *made.headers]
        request = "\r\n".join([*lines, "Accept: text/event-stream", "", ""]).encode()
        # First, since a stream begins with all that is open, and the orders will be.
        begun = resident_bytes(made.gateway.pid)
        async with _open(made.url, request, IDLE) as readers:
            await asyncio.sleep(3.0)
            each = (resident_bytes(made.gateway.pid) - begun) / IDLE
            held = sum(not one.ended for one in readers)
        async with _open(made.url, request, STREAMS) as readers:
            for _ in range(PACED):
                await load(made.url, ordering(made), connections=1, most=1)
                await asyncio.sleep(APART_S)
            await _all_heard(readers, PACED)
            late = percentile([late for one in readers for late in one.late_s], 0.99)
            before = made.cpu_s()
            await load(made.url, ordering(made), connections=CLIENTS, most=EVENTS)
            await _all_heard(readers, PACED + EVENTS)
            used = made.cpu_s() - before
        found = _heard(readers, late, used, await _bare())
        found.append(
            Figure(
                f"{IDLE} idle event streams: held; memory of each",
                f"{held}; {each / 1000:.0f} kB",
                aim=f"{IDLE}; ≤ {AIM_BYTES // 1000} kB",
                met=held == IDLE and each <= AIM_BYTES,
                how=_IDLE,
            )
        )
    return found


def _heard(
    readers: list[Reader], late: float, used_s: float, bare: tuple[float, float]
) -> list[Figure]:
    lost = sum(PACED + EVENTS - len(one.late_s) for one in readers)
    rate = STREAMS * EVENTS / used_s
    bare_late, bare_rate = bare
    what = f"{STREAMS} event streams"
    return [
        Figure(
            f"{what}: from an event's moment to its readers, p99", milliseconds(late),
            f"{milliseconds(bare_late)} (sse-starlette alone)", f"{late / bare_late:.2f}",
            aim=f"≤ {milliseconds(AIM_S)}", met=late <= AIM_S, how=_HEARD,
        ),
        Figure(
            f"{what}: events sent for a second of processor time", f"{rate:.0f}",
            f"{bare_rate:.0f} (sse-starlette alone)", f"{rate / bare_rate:.2f}",
            aim=f"≥ {AIM_RATE}", met=rate >= AIM_RATE, how=_HEARD,
        ),
        Figure(
            f"{what}: events that did not arrive, of {STREAMS * (PACED + EVENTS)}", str(lost),
            aim="0", met=lost == 0, how=_HEARD,
        ),
    ]  # fmt: skip


async def _bare() -> tuple[float, float]:
    """How late the events of the baseline are, and how many it sends for a second of processor."""
    with bare_streams() as (url, pid):
        netloc = urlsplit(url).netloc
        request = f"GET /events HTTP/1.1\r\nHost: {netloc}\r\n\r\n".encode()
        async with _open(url, request, STREAMS) as readers:
            one = f"POST /publish HTTP/1.1\r\nHost: {netloc}\r\nContent-Length: 0\r\n\r\n".encode()
            for _ in range(PACED):
                await load(url, lambda _number: one, connections=1, most=1)
                await asyncio.sleep(APART_S)
            await _all_heard(readers, PACED)
            late = percentile([late for one in readers for late in one.late_s], 0.99)
            before = cpu_s(pid)
            await load(url, lambda _number: one, connections=CLIENTS, most=EVENTS)
            await _all_heard(readers, PACED + EVENTS)
            used = cpu_s(pid) - before
    return late, STREAMS * EVENTS / used


@asynccontextmanager
async def _open(url: str, request: bytes, count: int) -> AsyncIterator[list[Reader]]:
    """So many streams, each with its first bytes."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    assert host is not None
    assert port is not None
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    transports: list[asyncio.BaseTransport] = []
    few = asyncio.Semaphore(64)

    async def one() -> None:
        async with few:
            transport, reader = await loop.create_connection(lambda: Reader(request), host, port)
            transports.append(transport)
            readers.append(reader)
            while not reader.begun:
                assert not reader.ended, "a stream was refused"
                await asyncio.sleep(0.01)

    try:
        await asyncio.gather(*(one() for _ in range(count)))
        yield readers
    finally:
        for transport in transports:
            transport.close()
        await asyncio.sleep(1.0)


async def _all_heard(readers: list[Reader], count: int) -> None:
    """Or 20 s later."""
    ends_at = asyncio.get_running_loop().time() + 20.0
    while any(len(one.late_s) < count for one in readers):
        if asyncio.get_running_loop().time() > ends_at:
            return
        await asyncio.sleep(0.05)


def _more_files(count: int) -> None:
    """This process, and those that it starts, may have so many open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
