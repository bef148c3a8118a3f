"""examples/client_update.py, with the client that scripts/gen-client makes, at a real gateway."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import Bridge
from tests.e2e.processes import START_S, Demo, environment

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "client_update.py"
PYTHON = ROOT / ".venv-client" / "bin" / "python"

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def client_is_made() -> None:
    """Whatever the generator can't make something of is an error of it."""
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gen-client"],
        capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr


@dataclass
class Cutting:
    """A way to the gateway that breaks. `cut`: what in a request or an answer lets it be cut there,
    once each."""

    upstream: str
    cut: list[bytes]
    url: str = ""

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = urlsplit(self.upstream)
        there, back = await asyncio.open_connection(place.hostname, place.port)
        sent = bytearray()
        asked = asyncio.create_task(self._ask(reader, back, sent))
        try:
            while data := await there.read(65536):
                if found := [mark for mark in self.cut if mark in sent + data]:
                    self.cut.remove(found[0])
                    break  # the gateway has done it, and nobody hears of it
                sent.clear()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            asked.cancel()
            back.close()
            writer.close()

    async def _ask(
        self, reader: asyncio.StreamReader, back: asyncio.StreamWriter, sent: bytearray
    ) -> None:
        while data := await reader.read(65536):
            sent += data
            back.write(data)
            await back.drain()
        back.close()


@asynccontextmanager
async def cutting(upstream: str, *cut: bytes) -> AsyncIterator[Cutting]:
    way = Cutting(upstream, list(cut))
    server = await asyncio.start_server(way.carry, "127.0.0.1", 0)
    async with server:
        way.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield way


async def program(demo: Demo, url: str, *words: str) -> tuple[int, str]:
    variables = environment(
        CHADBURN_URL=url, CHADBURN_TOKEN=demo.ready["tokens"]["operator"], PYTHONPATH=""
    )
    process = await asyncio.create_subprocess_exec(
        PYTHON, PROGRAM, *words, "--engine", demo.ready["engine"],
        cwd=demo.folder, env=variables,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(START_S):
        said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_it_updates_over_lost_answers_and_cut_streams(demo: Demo, bridge: Bridge) -> None:
    """Each order is in the ledger once, each event was told once."""
    lost = (b"/update-weights HTTP", b'"type":"dispatched"')
    before = (await bridge.gateway.client.get("/v1/operations")).json()["items"]
    async with cutting(demo.ready["base_url"], *lost) as way:
        code, said = await program(demo, way.url, demo.ready["next_weights"], "by-client")
    assert code == 0, said
    assert way.cut == []
    assert said.count("no answer") == 1
    assert said.count("the stream broke") == 1
    engine = (await bridge.gateway.client.get(f"/v1/engines/{bridge.engine}")).json()
    assert engine["facts"]["weights"]["version"] == "by-client"
    assert engine["facts"]["admission"] == "open"
    after = (await bridge.gateway.client.get("/v1/operations")).json()["items"]
    known = {one["id"] for one in before}
    made = [one for one in after if one["id"] not in known]
    assert [one["kind"] for one in made] == ["resume", "update_weights", "pause"]
    assert {one["state"] for one in made} == {"succeeded"}
    told = re.findall(r"^  (\w+) +\{", said, re.MULTILINE)
    assert told.count("completed") == told.count("accepted") == 3


async def test_an_update_that_fails_leaves_the_engine_open(
    demo: Demo, bridge: Bridge, tmp_path: Path
) -> None:
    code, said = await program(demo, demo.ready["base_url"], str(tmp_path), "never")
    assert code == 1
    assert "update: failed" in said
    assert said.splitlines()[-1] == "not updated"
    engine = (await bridge.gateway.client.get(f"/v1/engines/{bridge.engine}")).json()
    assert engine["facts"]["admission"] == "open"
    assert engine["facts"]["weights"]["version"] != "never"
