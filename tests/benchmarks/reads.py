"""GET of an engine, beside a bare FastAPI that asks the engine each time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.benchmarks.figures import Figure
from tests.benchmarks.wire import requests_per_second
from tests.e2e.conftest import Bridge

CONNECTIONS = 16
SECONDS = 4.0
_HOW = (
    f"{CONNECTIONS} open connections, one request at a time on each, against a running demo; "
    "beside it a bare FastAPI application that asks the engine each time and checks no token. "
    f"Three times {SECONDS:g} s each, in turns."
)


async def reads(bridge: Bridge) -> list[Figure]:
    address, token = bridge.ready["admin_address"], bridge.ready["tokens"]["engine"]
    with bare_application(address, token) as (base, _):
        plain = f"{base}/engine"
        ours = f"{bridge.gateway.url}/v1/engines/{bridge.engine}"
        bearer = [f"Authorization: Bearer {bridge.gateway.token}"]
        # In turns, so that a machine that slows down slows both down.
        rates: dict[str, list[float]] = {plain: [], ours: []}
        for _ in range(3):
            for url, headers in ((plain, []), (ours, bearer)):
                rates[url].append(
                    await requests_per_second(
                        url, headers, connections=CONNECTIONS, seconds=SECONDS
                    )
                )
    ours_rate, plain_rate = (sum(rates[url]) / len(rates[url]) for url in (ours, plain))
    return [
        Figure(
            f"GET engine, {CONNECTIONS} connections, token checked",
            f"{ours_rate:.0f}/s",
            f"{plain_rate:.0f}/s (FastAPI and one gRPC call, no token)",
            f"{ours_rate / plain_rate:.2f}",
            how=_HOW,
        )
    ]


@contextmanager
def bare_application(admin_address: str, token: str) -> Iterator[tuple[str, int]]:
    """Its URL, and the process."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.bare", str(port), admin_address],
        env={**os.environ, "ENGINE_TOKEN": token},
    )
    try:
        listening(port)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < until, "it does not listen"
            time.sleep(0.05)
        else:
            return
