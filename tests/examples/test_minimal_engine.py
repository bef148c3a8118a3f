"""The engine of `docs/write-an-engine.md`, as a process of its own, over real gRPC."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import generation_pb2, lifecycle_pb2
from tests.enginekit.client import Client, client_of, refused

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "minimal_engine.py"
PAGE = ROOT / "docs" / "write-an-engine.md"


@dataclass(frozen=True, slots=True)
class Addresses:
    inference_address: str
    admin_address: str


@asynccontextmanager
async def running(folder: Path, *addresses: str) -> AsyncIterator[Addresses]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, EXAMPLE, folder, *addresses, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        _, inference, _, admin = line.split()
        yield Addresses(inference, admin)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with running(tmp_path) as addresses, client_of(addresses) as connected:
        yield connected


def tokens(number: int) -> generation_pb2.StoppingOptions:
    return generation_pb2.StoppingOptions(max_tokens=number)


async def test_it_answers_and_its_cache_can_be_flushed(client: Client) -> None:
    said = client.generate("full ahead", stopping=tokens(3))
    assert await said.finish_reason() == "LENGTH"
    assert said.text == "full ahead full "
    (cache,) = (await client.completed(client.flush())).flush_caches.caches
    assert cache.blocks_freed == 1
    assert not (await client.completed(client.flush())).changed


async def test_it_is_paused_in_every_mode(client: Client) -> None:
    frozen = client.generate("full ahead", stopping=tokens(200))
    await frozen.first()
    paused = await client.completed(client.pause("keep"))
    assert paused.pause.requests_kept == 1
    held = client.generate("held", stopping=tokens(2))
    await client.held(1)
    resumed = await client.completed(client.resume(paused.pause.pause_epoch))
    assert resumed.resume.requests_continued == 1
    assert await frozen.finish_reason() == await held.finish_reason() == "LENGTH"
    assert len(frozen.text.split()) == 200

    long = client.generate("full ahead", stopping=tokens(4000))
    await long.first()
    assert (await client.completed(client.pause("abort"))).pause.requests_aborted == 1
    end = await long.end()
    assert "paused" in end.finished.message
    epoch = (await client.profile()).pause_epoch
    await client.completed(client.resume(epoch))

    short = client.generate("full ahead", stopping=tokens(200))
    await short.first()
    assert (await client.completed(client.pause("drain"))).pause.requests_finished == 1
    assert await short.finish_reason() == "LENGTH"


async def test_its_requests_can_be_aborted(client: Client) -> None:
    requests = [client.generate("full ahead", stopping=tokens(4000)) for _ in range(2)]
    for request in requests:
        await request.first()
    one = lifecycle_pb2.AbortRequest(request_id=requests[0].request_id)
    await client.control.Abort(one, timeout=30)
    assert await requests[0].finish_reason() == "CANCELLED"
    everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
    await client.control.Abort(everything, timeout=30)
    assert await requests[1].finish_reason() == "CANCELLED"


async def test_it_tells_only_what_it_can(client: Client) -> None:
    profile = await client.profile()
    assert [row.kind for row in profile.operations] == [1, 2, 3, 11]
    assert profile.state.weights.version == "v1"
    seen = await refused(client.stream(client.release("kv_cache")))
    assert seen.reason == "UNSUPPORTED_OPERATION"
    health = await client.control.Health(
        lifecycle_pb2.HealthRequest(include_inference_probe=True), timeout=30
    )
    assert health.state == lifecycle_pb2.HealthState.HEALTH_STATE_READY


async def test_a_restart_forgets_no_order(tmp_path: Path) -> None:
    async with running(tmp_path) as first, client_of(first) as client:
        order = client.pause("drain", idempotency_key="remembered")
        paused = await client.completed(order)
        before = await client.profile()
    async with running(tmp_path) as second, client_of(second) as client:
        assert await client.completed(order) == paused
        after = await client.profile()
        assert after.instance_id != before.instance_id
        assert after.revision > before.revision
        assert after.state.admission == pb.ADMISSION_STATE_OPEN


async def hook(folder: Path, *words: str) -> int:
    sockets = [f"unix:{folder}/{name}.sock" for name in ("inference", "admin")]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        EXAMPLE.with_name("minimal_engine_hook.py"),
        folder,
        *sockets,
        *words,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    async with asyncio.timeout(60):
        return await process.wait()


async def test_its_fault_hook_kills_and_restarts_it(tmp_path: Path) -> None:
    addresses = Addresses(f"unix:{tmp_path}/inference.sock", f"unix:{tmp_path}/admin.sock")
    assert await hook(tmp_path, "restart") == 0
    try:
        async with client_of(addresses) as client:
            before = await client.profile()
        assert await hook(tmp_path, "kill-rank", "0") == 0
        assert await hook(tmp_path, "restart") == 0
        async with client_of(addresses) as client:
            after = await client.profile()
        assert after.instance_id != before.instance_id
        assert after.revision > before.revision
        assert await hook(tmp_path, "stop-rank", "0") != 0
    finally:
        await hook(tmp_path, "kill-rank", "0")


def test_the_page_shows_it_as_it_is() -> None:
    code = EXAMPLE.read_text()
    assert len(code.splitlines()) < 100
    (shown,) = re.findall(
        r"^```python title=minimal_engine\.py\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    assert shown == code
