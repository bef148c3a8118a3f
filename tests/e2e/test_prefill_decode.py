"""Prefill in one process and decode in another, as the page about it says."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.inference_client import (
    Finished,
    Generation,
    GenerationRefused,
    InferenceClient,
    KvSession,
    Piece,
)
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import admin_pb2_grpc, server_pb2
from tests.e2e.processes import Process, chadburn, cleaned

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).resolve().parents[2] / "docs" / "prefill-decode.md"
WAIT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Typed:
    """The page's commands with a folder and ports of this test's own."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)

    def commands(self) -> list[list[str]]:
        blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S)
        lines = "".join(blocks).replace("\\\n", " ").splitlines()
        return [shlex.split(self._own(line)) for line in lines]

    def _own(self, line: str) -> str:
        line = line.replace("/tmp", str(self.folder))
        return re.sub(r"127\.0\.0\.1:(70\d\d)", lambda found: self.address(found[1]), line)

    def address(self, port: str) -> str:
        return f"127.0.0.1:{self.ports.setdefault(port, free_port())}"


@dataclass
class Standing:
    typed: Typed
    engines: list[Process]
    generate: list[str]

    @property
    def prefill(self) -> InferenceClient:
        return InferenceClient(self.typed.address("7001"), "none")

    @property
    def decode(self) -> InferenceClient:
        return InferenceClient(self.typed.address("7011"), "none")


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    typed = Typed(tmp_path_factory.mktemp("page"))
    engines: list[Process] = []
    others: list[list[str]] = []
    for words in typed.commands():
        assert words[0] == "chadburn"
        if words[-1] != "&":
            others.append(words[1:])
            continue
        name = f"engine{len(engines)}"
        more = f"--ready-file={typed.folder / name}.json"
        log = typed.folder / f"{name}.log"
        engines.append(Process(name, [*words[1:-1], more], log, typed.folder))
    (generate,) = others
    assert len(engines) == 2
    with cleaned(*engines):
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.ready(typed.folder / f"{engine.name}.json")
        yield Standing(typed, engines, generate)


GENERATION = Generation(
    request_id="r", prompt="all hands on deck", max_tokens=40, temperature=1.0, seed=5
)


async def text_of(
    client: InferenceClient, generation: Generation, session: KvSession | None = None
) -> tuple[str, Finished]:
    text = ""
    async for piece in client.generate(generation, timeout_s=WAIT_S, session=session):
        if isinstance(piece, Piece):
            text += piece.text
        else:
            return text, piece
    raise AssertionError("no end")


async def reconfigured(address: str, role: Any) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = admin_pb2_grpc.OpenEngineAdminStub(channel)
        request = pb.ReconfigureServingRequest(
            idempotency_key=f"role-{role}", role=role, drain=pb.DRAIN_RULE_WAIT
        )
        events = [one async for one in stub.ReconfigureServing(request, timeout=WAIT_S)]
    assert events[-1].completed.reconfigure_serving.role == role, events[-1]


async def test_the_page_is_right(standing: Standing) -> None:
    """And what two engines say is what one of them says alone."""
    done = chadburn(*standing.generate, "--json", "--seed", "5", "--temperature", "1")
    assert done.returncode == 0, done.stderr
    assert '"finished":"length"' in done.stdout or '"finished":"stop"' in done.stdout
    async with standing.prefill as prefill, standing.decode as decode:
        session = await prefill.prefill(GENERATION, timeout_s=WAIT_S)
        text, end = await text_of(decode, GENERATION, session)
        assert end.cached_prompt_tokens == (end.prompt_tokens or 0) - 1
        admin = standing.typed.address("7012")
        await reconfigured(admin, server_pb2.ENGINE_ROLE_AGGREGATED)
        alone, _ = await text_of(decode, GENERATION)
        await reconfigured(admin, server_pb2.ENGINE_ROLE_DECODE)
    assert text == alone


async def test_each_engine_says_what_it_is_for(standing: Standing) -> None:
    async with standing.prefill as prefill, standing.decode as decode:
        with pytest.raises(GenerationRefused, match="does prefill alone"):
            await text_of(prefill, GENERATION)
        with pytest.raises(GenerationRefused, match="a prefill engine gives one"):
            await text_of(decode, GENERATION)


async def test_with_its_engine_a_session_is_gone(standing: Standing) -> None:
    """The last one here: it kills an engine, and the other goes on."""
    async with standing.prefill as prefill, standing.decode as decode:
        session = await prefill.prefill(GENERATION, timeout_s=WAIT_S)
        standing.engines[0].kill()
        with pytest.raises(GenerationRefused) as refused:
            await text_of(decode, GENERATION, session)
        assert refused.value.retryable
        with pytest.raises(GenerationRefused, match="a prefill engine gives one"):
            await text_of(decode, GENERATION)
