"""What the gateway spends of processors on one request, up to its answer.

Processor time of the whole process by `/proc`, which says the same on a machine that does other
things besides; rates and times of answers do not.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.benchmarks.figures import Figure, milliseconds, percentile
from tests.benchmarks.gateways import HELD, Plant, cpu_s, plant
from tests.benchmarks.reads import bare_application
from tests.benchmarks.wire import Load, Make, getting, load

ENGINES = 8
CLIENTS = 8
SECONDS = 5.0
_HOW = (
    f"{CLIENTS} open connections, one request at a time on each, for {SECONDS:g} s, on a gateway "
    f"that watches {ENGINES} engines, which are doubles in another process. Processor time of the "
    "gateway's process, in user and system mode, over the requests answered; every answer was 2xx."
)
_ORDERS = (
    f"{_HOW} The orders end all requests of an engine, each under a key of its own. They are taken "
    "on (token, key, judgement, operation, event and audit in one transaction) and not carried out."
)


@dataclass(frozen=True, slots=True)
class Cost:
    load: Load
    cpu_ms: float
    """Of each request."""


async def figures(folder: Path, database: str, url: str | None) -> list[Figure]:
    """`url` None: SQLite."""
    found: list[Figure] = []
    async with plant(folder, engines=ENGINES, command=HELD, database_url=url) as made:
        await made.register_all()
        pid, engine = made.gateway.pid, f"{made.url}/v1/engines/{made.engines[0]}"
        orders = await _cost(pid, made.url, ordering(made))
        found += _of_orders(database, orders)
        read = await _cost(pid, made.url, getting(engine, made.headers))
        found.append(_of_read(f"GET engine from the ledger on {database}", read, 1.0))
        path = f"{made.url}/v1/operations?page_size=15"
        listed = await _cost(pid, made.url, getting(path, made.headers))
        found.append(_of_read(f"GET operations, a page of 15, on {database}", listed))
        if url is None:
            with bare_application(made.admin_addresses[0], "none") as (plain, bare):
                hop = await _cost(bare, plain, getting(f"{plain}/load", []))
            passed = await _cost(pid, made.url, getting(f"{engine}/load", made.headers))
            found.append(_of_hop(passed, hop))
    return found


async def _cost(pid: int, url: str, make: Make) -> Cost:
    await load(url, make, connections=CLIENTS, seconds=1.0)
    before = cpu_s(pid)
    done = await load(url, make, connections=CLIENTS, seconds=SECONDS)
    return Cost(done, (cpu_s(pid) - before) / len(done.taken_s) * 1000)


def _of_orders(database: str, cost: Cost) -> list[Figure]:
    what = f"order taken on over HTTP, ledger on {database}, {CLIENTS} clients"
    late = percentile(cost.load.taken_s, 0.99)
    return [
        Figure(
            f"{what}: processor time", f"{cost.cpu_ms:.2f} CPU-ms", aim="≤ 1.5 CPU-ms",
            met=cost.cpu_ms <= 1.5, how=_ORDERS,
        ),
        Figure(
            f"{what}: rate", f"{cost.load.rate:.0f}/s", aim="≥ 500/s",
            met=cost.load.rate >= 500, how=_ORDERS,
        ),
        Figure(
            f"{what}: p99", milliseconds(late), aim="≤ 25.0 ms", met=late <= 0.025, how=_ORDERS
        ),
    ]  # fmt: skip


def _of_read(what: str, cost: Cost, aim: float | None = None) -> Figure:
    return Figure(
        what,
        f"{cost.cpu_ms:.2f} CPU-ms, {cost.load.rate:.0f}/s",
        aim="" if aim is None else f"≤ {aim:.1f} CPU-ms",
        met=aim is None or cost.cpu_ms <= aim,
        how=_HOW,
    )


def _of_hop(cost: Cost, bare: Cost) -> Figure:
    above = cost.cpu_ms - bare.cpu_ms
    return Figure(
        "GET load, passed through to the engine",
        f"{cost.cpu_ms:.2f} CPU-ms, {cost.load.rate:.0f}/s",
        f"{bare.cpu_ms:.2f} CPU-ms, {bare.load.rate:.0f}/s (FastAPI and the same call, no token)",
        f"{cost.cpu_ms / bare.cpu_ms:.2f}",
        aim="≤ 0.5 CPU-ms above it",
        met=above <= 0.5,
        how=_HOW,
    )


def ordering(made: Plant) -> Make:
    """Each of them an order to end all requests of an engine, to one engine after the other."""
    body = b'{"all": true}'
    heads = [
        "\r\n".join(
            [
                f"POST /v1/engines/{engine}/abort-requests HTTP/1.1",
                f"Host: {urlsplit(made.url).netloc}",
                *made.headers,
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
                "Idempotency-Key: ",
            ]
        ).encode()
        for engine in made.engines
    ]

    def make(number: int) -> bytes:
        key = str(uuid.uuid4()).encode()
        return heads[number % len(heads)] + key + b"\r\n\r\n" + body

    return make
