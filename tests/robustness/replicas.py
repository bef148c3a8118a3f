"""Several gateways on one PostgreSQL, each a process that can be stopped, frozen and killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg

from app.devidp.issuer import DevIssuer
from app.devidp.running import DevIssuerSettings, running
from app.domain.scopes import Scope
from tests.e2e.driving import WAIT_S, Gateway
from tests.e2e.processes import POLL_S, Process

LEASE_S = 5.0
FLUSH = ("flush-caches", {"caches": ["prefix"]})
PRINCIPAL = "ada/console"
_ADMIN, _INFERENCE = "urn:test:admin", "urn:test:inference"


@dataclass
class Replica:
    """One gateway; after a new start it is at the same place."""

    process: Process
    config: Path
    port: int = 0
    client: Gateway | None = None

    def begin(self) -> None:
        """Started, and not waited for."""
        self._ready.unlink(missing_ok=True)
        self.process.arguments = [
            "serve",
            f"--config={self.config}",
            f"--port={self.port}",
            f"--ready-file={self._ready}",
        ]
        self.process.start()

    async def ready(self, token: str) -> None:
        found = await asyncio.to_thread(self.process.ready, self._ready)
        self.port = int(found["base_url"].rpartition(":")[2])
        if self.client is None:
            self.client = Gateway(found["base_url"], token)

    @property
    def gateway(self) -> Gateway:
        assert self.client is not None, "it was never ready"
        return self.client

    @property
    def _ready(self) -> Path:
        return self.config.with_suffix(".json")

    def freeze(self) -> None:
        """As a machine that swaps, or a virtual one that is moved: alive, and nothing happens."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    async def stop(self) -> int:
        return await asyncio.to_thread(self.process.stop)


@dataclass
class Replicas:
    """`all` of them on the ledger at `database_url`."""

    folder: Path
    database_url: str
    issuer: DevIssuer
    token: str
    all: list[Replica] = field(default_factory=list)

    def __getitem__(self, number: int) -> Replica:
        return self.all[number]

    def make(self, **settings: Any) -> Replica:
        """One more, not started."""
        number = len(self.all)
        config = self.folder / f"gateway-{number}.toml"
        config.write_text(_config(self, number, settings))
        process = Process(f"gateway {number}", [], config.with_suffix(".log"), self.folder)
        self.all.append(Replica(process, config))
        return self.all[number]

    async def start(self, replicas: Iterable[Replica]) -> None:
        """All at once."""
        started = tuple(replicas)
        for replica in started:
            replica.begin()
        for replica in started:
            await replica.ready(self.token)

    async def register(self, address: str, engine: str) -> None:
        """At the first one."""
        gateway = self.all[0].gateway
        members = [{"rank": 0, "admin": address, "control": address}]
        made = await gateway.client.post("/v1/engines", json={"id": engine, "members": members})
        assert made.status_code == 201, made.text
        await gateway.until(
            f"/v1/engines/{engine}", lambda found: found["health"]["state"] == "serving"
        )

    def connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.database_url.replace("+psycopg", ""))

    def lease(self, engine: str) -> tuple[str, datetime] | None:
        """Whose it is, and until when. None: it never was anybody's."""
        with self.connection() as connection:
            query = "SELECT owner, expires_at FROM leases WHERE engine_id = %s"
            found = connection.execute(query, (engine,)).fetchone()
        return None if found is None else (found[0], found[1])

    def holder(self, engine: str) -> Replica | None:
        """Whose lease the engine's is now, also when its time is up. None: nobody's."""
        lease = self.lease(engine)
        pid = lease[0].split(":")[1] if lease and lease[0] else None
        return next((each for each in self.all if str(each.process.pid) == pid), None)

    async def held(self, engine: str, *, but: Replica | None = None) -> Replica:
        """By somebody, who is not `but`."""
        await until(lambda: self.holder(engine) not in (None, but))
        holder = self.holder(engine)
        assert holder is not None
        return holder

    def peer(self, replica: Replica) -> Replica:
        return next(each for each in self.all if each is not replica and each.process.running)

    async def close(self) -> None:
        for replica in self.all:
            if replica.process.running:
                replica.thaw()
        for replica in self.all:
            if replica.process.running:
                await replica.stop()
            if replica.client is not None:
                await replica.client.client.aclose()


@asynccontextmanager
async def replicas(
    folder: Path, database_url: str, count: int, **settings: Any
) -> AsyncIterator[Replicas]:
    """All started, on an empty database."""
    issuing = DevIssuerSettings(
        secret="s" * 40,
        admin_audience=_ADMIN,
        inference_audience=_INFERENCE,
        engine_audience="urn:test:engine",
    )
    async with running(issuing) as issuer:
        subject, client_id = PRINCIPAL.split("/")
        token = issuer.mint(subject, client_id, tuple(Scope), _ADMIN, 3600)
        made = Replicas(folder, database_url, issuer, token)
        try:
            await made.start(made.make(**settings) for _ in range(count))
            yield made
        finally:
            await made.close()


async def until(holds: Callable[[], object]) -> None:
    """Looked at again and again, and not for ever."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(POLL_S)


def _config(of: Replicas, number: int, settings: Mapping[str, Any]) -> str:
    values = {
        "data_dir": str(of.folder / f"data-{number}"),
        "database_url": of.database_url,
        "audience": _ADMIN,
        "observe_interval_s": 0.5,
        "lease_s": LEASE_S,
        "shutdown_grace_s": 5.0,
        "audit_seal_s": 1,
        **settings,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    issuer = json.dumps(of.issuer.issuer)
    return "\n".join([*lines, "[[issuers]]", f"issuer = {issuer}"]) + "\n"
