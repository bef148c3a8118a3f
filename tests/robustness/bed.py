"""A gateway and its engines as processes, one of which is killed at named points, under clients who
go on regardless.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from app.clock import SystemClock
from app.devidp.issuer import DevIssuer
from app.devidp.running import DevIssuerSettings, running
from app.domain.scopes import Scope
from app.ledger import Ledger
from app.ledger.chain import verify
from tests.e2e.processes import POLL_S
from tests.robustness import breaking_gateway, counting_engine
from tests.robustness.check import hold
from tests.robustness.clients import Clients
from tests.robustness.crash_points import CrashPoints
from tests.robustness.final_ledger import write_ledger
from tests.robustness.history import History, Recorder, Struck
from tests.robustness.killed_processes import EndedEarly, Killed

ROOT = Path(__file__).parents[2]
HISTORIES = ROOT / ".data" / "histories"
_ADMIN, _SUBJECT, _CLIENT = "urn:test:admin", "ada", "console"
WAIT_S = 120.0


@dataclass
class Bed:
    """`next_points`: armed one by one, each before the gateway is started again."""

    folder: Path
    database_url: str
    recorder: Recorder
    points: CrashPoints
    issuer: DevIssuer
    clients: Clients
    engines: dict[str, str] = field(default_factory=dict)
    next_points: list[str] = field(default_factory=list)
    url: str = ""
    _gateway: Killed | None = None
    _engine: Killed | None = None
    _keeping: asyncio.Task[None] | None = None

    # ---- processes ----

    async def start_engines(self, names: Sequence[str], seed: int, delay_s: float) -> None:
        ready = self.folder / "engines.json"
        self._engine = Killed.start(
            self.folder / "engines.log",
            counting_engine.main,
            self.folder / "engines",
            ready,
            self.recorder.path,
            seed,
            delay_s,
            self.folder,
            tuple(names),
        )
        self.engines = await self._engine.ready(ready)

    async def start_gateway(self) -> None:
        """At the address it had before, if any. Raises EndedEarly."""
        ready = self.folder / "gateway.json"
        ready.unlink(missing_ok=True)
        self._gateway = Killed.start(
            self.folder / "gateway.log",
            breaking_gateway.main,
            self.folder / "gateway.toml",
            int(self.url.rpartition(":")[2] or 0),
            ready,
            self.recorder.path,
            self.folder,
        )
        self.url = (await self._gateway.ready(ready))["base_url"]
        self.clients.urls = [self.url]
        self.recorder.write(Struck(process="gateway", what="started"))

    def keep_gateway(self) -> None:
        """Start it again each time that it was killed."""
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            assert self._gateway is not None
            code = await self._gateway.ended()
            assert code == -signal.SIGKILL, self._gateway.said()
            if self.next_points:
                self.points.arm(self.next_points.pop(0))
            # It may be killed again before it answers.
            with contextlib.suppress(EndedEarly):
                await self.start_gateway()

    async def stop_gateway(self) -> None:
        """As an init system does it."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        assert self._gateway is not None
        assert await self._gateway.stop() == 0, self._gateway.said()

    async def clean(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        for process in (self._gateway, self._engine):
            if process is not None:
                process.kill()

    # ---- faults ----

    def signal_engines(self, sent: signal.Signals) -> None:
        assert self._engine is not None
        pid = self._engine.process.pid
        assert pid is not None
        os.kill(pid, sent)

    async def kill_at(self, point: str, *then: str) -> None:
        """And at the further points each time that it has come back. Gives when it answers after
        the last one."""
        self.next_points += then
        self.points.arm(point)
        await until(lambda: not self.next_points and self.points.armed is None)
        await until(self._answers)

    async def _answers(self) -> bool:
        with contextlib.suppress(Exception):
            answer = await self.clients.http.get(f"{self.url}/healthz", timeout=5.0)
            return answer.status_code == 200
        return False

    # ---- the end ----

    async def history(self) -> History:
        """Everything has ended: the ledger is written down, and all guarantees are held."""
        await self.stop_gateway()
        ledger = await Ledger.open(self.database_url, clock=SystemClock())
        try:
            await write_ledger(self.recorder, ledger)
        finally:
            await ledger.close()
        assert (await verify(self.database_url)).broken is None, "the audit's chain"
        assert self.clients.trouble == []
        return hold(self.recorder.path)


@asynccontextmanager
async def bed(
    folder: Path,
    name: str,
    seed: int,
    *,
    database_url: str | None = None,
    engines: Sequence[str] = ("e1", "e2"),
    delay_s: float = 0.02,
) -> AsyncIterator[Bed]:
    """Engines that are registered and known to a gateway which is kept running. `database_url`
    None: SQLite. `name`: of the history's file. `delay_s`: a step of an order takes up to it."""
    HISTORIES.mkdir(parents=True, exist_ok=True)
    issuing = DevIssuerSettings(
        secret="s" * 40,
        admin_audience=_ADMIN,
        inference_audience="urn:test:inference",
        engine_audience="urn:test:engine",
    )
    async with AsyncExitStack() as held:
        kind = "sqlite" if database_url is None else "postgresql"
        recorder = Recorder.begin(HISTORIES / f"{name}.jsonl", seed, database=kind)
        held.callback(recorder.close)
        issuer = await held.enter_async_context(running(issuing))
        token = issuer.mint(_SUBJECT, _CLIENT, tuple(Scope), _ADMIN, 3600)
        clients = Clients([], token, f"{_SUBJECT}/{_CLIENT}", recorder, Random(seed))
        await held.enter_async_context(clients.connected())
        url = database_url or f"sqlite+aiosqlite:///{folder}/ledger.db"
        made = Bed(folder, url, recorder, CrashPoints(folder, recorder), issuer, clients)
        held.push_async_callback(made.clean)
        (folder / "gateway.toml").write_text(_config(folder, url, issuer))
        await made.start_engines(engines, seed, delay_s)
        await made.start_gateway()
        for engine, address in made.engines.items():
            await _register(made, engine, address)
        made.keep_gateway()
        yield made


def _config(folder: Path, database_url: str, issuer: DevIssuer) -> str:
    return f"""\
data_dir = {json.dumps(str(folder / "gateway"))}
database_url = {json.dumps(database_url)}
audience = {json.dumps(_ADMIN)}
observe_interval_s = 1.0
audit_seal_s = 1

[[issuers]]
issuer = {json.dumps(issuer.issuer)}
inference_audiences = ["urn:test:inference"]
algorithms = [{json.dumps(issuer.algorithm)}]
"""


async def _register(made: Bed, engine: str, address: str) -> None:
    body = {"id": engine, "members": [{"rank": 0, "admin": address, "control": address}]}
    answer = await made.clients.http.post(f"{made.url}/v1/engines", json=body)
    assert answer.status_code == 201, answer.text

    async def known() -> bool:
        found = await made.clients.http.get(f"{made.url}/v1/engines/{engine}")
        return found.json()["facts"] is not None

    await until(known)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(POLL_S)
