"""An engine that is cut off in the middle of an order, settled by a person with curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.devidp.issuer import DevIssuer
from app.devidp.running import DevIssuerSettings, running
from app.domain.scopes import Scope
from tests.doubles.engine import EngineDouble, running_engine
from tests.e2e.driving import Gateway, admin, sequences
from tests.e2e.processes import Process, cleaned
from tests.enginekit.minimal_engine import until as released_by

pytestmark = pytest.mark.anyio

ADMIN = "urn:test:admin"


class Line:
    """A TCP way to an address. Once it is cut nothing comes through in either direction, and
    whoever calls is connected to nobody: a black hole."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self.server: asyncio.Server

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        self._open = False
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._open = True
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._open:
                await self._connect(reader, writer)
            else:
                while await reader.read(65536):
                    pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers.add(back)
        try:
            pumps = [_pump(reader, back), _pump(there, writer)]
            tasks = [asyncio.create_task(pump) for pump in pumps]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._writers.discard(back)
            back.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()


@asynccontextmanager
async def line(address: str) -> AsyncIterator[tuple[Line, str]]:
    made = Line(address)
    own = await made.start()
    try:
        yield made, own
    finally:
        made.cut()
        made.server.close()
        await made.server.wait_closed()


@asynccontextmanager
async def serving(folder: Path, issuer: DevIssuer) -> AsyncIterator[str]:
    """A `chadburn serve`; its address."""
    text = json.dumps
    (folder / "gateway.toml").write_text(
        f"data_dir = {text(str(folder / 'gateway'))}\n"
        f"audience = {text(ADMIN)}\n"
        "observe_interval_s = 0.5\n"
        f"[[issuers]]\nissuer = {text(issuer.issuer)}\n"
        f"algorithms = [{text(issuer.algorithm)}]\n"
    )
    ready = folder / "ready.json"
    arguments = ["serve", f"--config={folder / 'gateway.toml'}", "--port=0"]
    process = Process(
        "gateway", [*arguments, f"--ready-file={ready}"], folder / "gateway.log", folder
    )
    process.start()
    with cleaned(process):
        try:
            yield (await asyncio.to_thread(process.ready, ready))["base_url"]
        finally:
            await asyncio.to_thread(process.clean)


def curl(url: str, token: str, body: dict[str, Any]) -> dict[str, Any]:
    own = shutil.which("curl")
    command = [own] if own else [sys.executable, str(Path(__file__).with_name("curl.py"))]
    headers = [f"Authorization: Bearer {token}", "Content-Type: application/json"]
    given = [word for header in headers for word in ("-H", header)]
    answer = subprocess.run(
        [*command, "-sS", *given, "-d", json.dumps(body), url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


async def test_a_person_settles_what_a_cut_line_has_left_in_doubt(tmp_path: Path) -> None:
    issuing = DevIssuerSettings(
        secret="s" * 40,
        admin_audience=ADMIN,
        inference_audience="urn:test:inference",
        engine_audience="urn:test:engine",
    )
    async with (
        running(issuing) as issuer,
        running_engine(tmp_path / "engine") as engine,
        line(engine.admin_address) as (way, address),
        serving(tmp_path, issuer) as url,
    ):
        scopes = tuple(Scope)
        person = issuer.mint("ada", "console", scopes, ADMIN, 3600)
        program = issuer.mint("console", "console", scopes, ADMIN, 3600)
        gateway = Gateway(url, person)
        async with gateway.client:
            await _settled(gateway, engine, way, address, person, program)


async def _settled(
    gateway: Gateway, engine: EngineDouble, way: Line, address: str, person: str, program: str
) -> None:
    made = await gateway.client.post(
        "/v1/engines", json={"id": "e1", "members": [{"admin": address, "control": address}]}
    )
    assert made.status_code == 201, made.text
    await gateway.open_again("e1")
    go = asyncio.Event()
    engine.engine.script("prepare", released_by(go))
    operation = await gateway.accepted("e1", "pause", {"mode": "drain"})
    path = f"/v1/operations/{operation['id']}"
    while not engine.orders:  # noqa: ASYNC110 - the test's own limit bounds it
        await asyncio.sleep(0.02)

    hearing = asyncio.create_task(gateway.hear(operation["id"]))
    way.cut()
    await gateway.until(path, lambda found: found["state"] == "reconciling")
    stuck = await gateway.get("/v1/operations?state=reconciling")
    assert [each["id"] for each in stuck["items"]] == [operation["id"]]
    busy = await gateway.order("e1", "flush-caches", {"caches": ["prefix"]})
    assert (busy.status_code, busy.json()["reason"]) == (409, "ENGINE_BUSY")

    said = {"outcome": "failed", "reason": "the cable was cut", "message": "nobody knows"}
    to = f"{gateway.url}{path}/settle"
    refused = await asyncio.to_thread(curl, to, program, said)
    assert refused["reason"] == "PERSON_NEEDED"
    settled = await asyncio.to_thread(curl, to, person, said)
    assert (settled["state"], settled["verification"]) == ("failed", "settled")
    assert settled["error"]["message"] == "nobody knows"
    told = await asyncio.wait_for(hearing, 60)
    assert [event.type for event in told][-2:] == ["reconciling", "settled"]

    # The slot is free, so the next order is taken, and goes through once the line is mended.
    following = await gateway.accepted("e1", "flush-caches", {"caches": ["prefix"]})
    go.set()
    async with admin(engine.admin_address, "past the line") as itself:
        key = operation["id"]
        while not (await itself.operation(key)).HasField("completed"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    way.mend()
    ended = await gateway.ended(following["id"])
    assert ended["state"] == "succeeded", ended
    # The pause was carried out after all. That shows in the facts, and the end stays as stated.
    facts = (await gateway.get("/v1/engines/e1"))["facts"]
    assert facts["pause"]["mode"] == "drain"
    assert await gateway.get(path) == settled
    ledger = await gateway.events(operation["id"])
    assert sequences(ledger) == list(range(1, len(ledger) + 1))
    assert [event["type"] for event in ledger].count("settled") == 1
