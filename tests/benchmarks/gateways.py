"""A gateway as a process of its own, an issuer, and engines that cost next to nothing beside it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from app.demo.plan import ADMIN_AUDIENCE
from tests.e2e.processes import COMMAND, Process, cleaned

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
HELD = (sys.executable, "-m", "tests.benchmarks.held_gateway")


@dataclass
class Plant:
    """`engines`: ids, as registered. `slow`: the one that takes 10 s for an order."""

    gateway: Process
    url: str
    token: str
    admin_addresses: list[str]
    slow_address: str
    engines: list[str] = field(default_factory=list)

    @property
    def headers(self) -> list[str]:
        return [f"Authorization: Bearer {self.token}"]

    def cpu_s(self) -> float:
        """What the gateway has used of processors until now, in user and system mode."""
        return cpu_s(self.gateway.pid)

    @property
    def ready_file(self) -> Path:
        return self.gateway.cwd / "gateway.json"

    def found_again(self) -> None:
        """After a start: where it is now."""
        self.url = self.gateway.ready(self.ready_file)["base_url"]

    async def register(self, engine: str, address: str) -> None:
        async with self.client() as client:
            await self._register(client, engine, address)

    async def register_all(self) -> None:
        """Every light engine but the slow one, and wait until all have been read."""
        named = {f"light-{n:04}": address for n, address in enumerate(self.admin_addresses)}
        async with self.client() as client:
            few = asyncio.Semaphore(8)

            async def one(engine: str, address: str) -> None:
                async with few:
                    await self._register(client, engine, address)

            await asyncio.gather(*(one(*each) for each in named.items()))
            self.engines = list(named)
            for engine in self.engines:
                while True:
                    found = (await client.get(f"/v1/engines/{engine}")).json()
                    if found["health"]["state"] == "serving":
                        break
                    await asyncio.sleep(0.1)

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {self.token}"}, timeout=60.0
        )

    @staticmethod
    async def _register(client: httpx2.AsyncClient, engine: str, address: str) -> None:
        members = [{"rank": 0, "admin": address, "control": address}]
        made = await client.post("/v1/engines", json={"id": engine, "members": members})
        assert made.status_code == 201, made.text


def cpu_s(pid: int) -> float:
    """What the process has used of processors until now, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@asynccontextmanager
async def plant(
    folder: Path,
    *,
    engines: int,
    database_url: str | None = None,
    command: tuple[str, ...] = COMMAND,
    more: str = "",
) -> AsyncIterator[Plant]:
    """All started; no engine is registered. `database_url` None: SQLite."""
    secret = secrets.token_urlsafe(24)
    _prepare(folder, secret)

    def process(name: str, arguments: list[str], by: tuple[str, ...] = COMMAND) -> Process:
        return Process(name, arguments, folder / f"{name}.log", folder, by)

    issuer = process(
        "issuer",
        [
            "dev-issuer", f"--data-dir={folder / 'issuer'}", f"--secret-file={folder / 'secret'}",
            f"--ready-file={folder / 'issuer.json'}",
        ],
    )  # fmt: skip
    light = process(
        "engines",
        [str(folder / "engines.json"), str(engines)],
        (sys.executable, "-m", "tests.benchmarks.light_engines"),
    )
    gateway = process(
        "gateway",
        [
            "serve", f"--config={folder / 'gateway.toml'}", "--port=0",
            f"--ready-file={folder / 'gateway.json'}",
        ],
        command,
    )  # fmt: skip
    with cleaned(issuer, light, gateway):
        issuer.start()
        light.start()
        url = issuer.ready(folder / "issuer.json")["issuer"]
        (folder / "gateway.toml").write_text(more + _config(folder, url, database_url))
        gateway.start()
        ready = light.ready(folder / "engines.json")
        async with httpx2.AsyncClient() as client:
            answer = await client.post(
                f"{url}/token",
                data={"grant_type": "client_credentials"},
                auth=("operator", secret),
            )
        yield Plant(
            gateway,
            gateway.ready(folder / "gateway.json")["base_url"],
            answer.json()["access_token"],
            ready["admin_addresses"],
            ready["slow"],
        )


def _prepare(folder: Path, secret: str) -> None:
    folder.mkdir(parents=True)
    (folder / "secret").write_text(secret)


def _config(folder: Path, issuer: str, database_url: str | None) -> str:
    text: Any = json.dumps
    database = "" if database_url is None else f"database_url = {text(database_url)}\n"
    return f"""\
data_dir = {text(str(folder / "gateway"))}
audience = {text(ADMIN_AUDIENCE)}
max_changes_per_s = 0
max_changes_per_s_of_address = 0
max_open_operations = 1000000
{database}
[[issuers]]
issuer = {text(issuer)}
"""
