"""New weights for an engine of two ranks, by real processes: from disk, and from a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from tests.e2e.conftest import Bridge
from tests.e2e.driving import talk
from tests.e2e.processes import (
    POLL_S,
    START_S,
    Process,
    chadburn,
    cleaned,
    descendants,
    environment,
    gone,
)
from tests.e2e.stack import ENGINE, Stack, register, stack
from tests.reference_engine.trainers import GROUP, tensors_of, trainer

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "trainer.py"
FILE = "model.safetensors"
TRAINER_S = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def port() -> int:
    """Where the trainer may be met."""
    return free_port()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    (folder / "weights").mkdir()
    arguments = (
        "--tensor-parallel-size=2",
        f"--weights-root={folder / 'weights'}",
        f"--rendezvous-allow=127.0.0.1:{port}",
        "--weight-version=v1",
        "--step-delay-ms=1",
    )
    with stack(folder, engine_arguments=arguments) as found:
        yield found


@pytest.fixture(scope="module")
def other(standing: Stack) -> Path:
    """Another version, where the engine may read."""
    return ensure_tiny_checkpoint(standing.folder / "weights", 1)


@pytest.fixture(scope="module")
def first(standing: Stack) -> Path:
    """The checkpoint that the engine made for itself."""
    (found,) = (standing.folder / "engine" / "models").glob("tiny-*")
    return found


@pytest.fixture
async def bridge(standing: Stack) -> AsyncIterator[Bridge]:
    """The engine with its first weights, serving."""
    bridge = standing.bridge
    async with bridge.gateway.client:
        known = await bridge.gateway.client.get(f"/v1/engines/{ENGINE}")
        if known.status_code == 404:
            await register(bridge)
        await bridge.gateway.open_again(ENGINE)
        yield bridge


def command(bridge: Bridge, *arguments: str) -> subprocess.CompletedProcess[str]:
    return chadburn(
        "update-weights",
        ENGINE,
        *arguments,
        "--pause=keep",
        "--wait",
        "--json",
        CHADBURN_URL=bridge.gateway.url,
        CHADBURN_TOKEN=bridge.gateway.token,
    )


def train(bridge: Bridge, checkpoint: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLE, checkpoint, f"--engine={ENGINE}", *arguments],
        env=environment(CHADBURN_URL=bridge.gateway.url, CHADBURN_TOKEN=bridge.gateway.token),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TRAINER_S,
        check=False,
    )


async def said(bridge: Bridge) -> str:
    talk = await bridge.talk("the bridge rings", **WANTED).over()
    assert talk.error is None
    return talk.text


WANTED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 3}


async def test_weights_from_disk(bridge: Bridge, standing: Stack, other: Path) -> None:
    before = await said(bridge)
    ended = await asyncio.to_thread(command, bridge, f"--disk={other}", "--weight-version=v2")
    assert ended.returncode == 0, ended
    operation = json.loads(ended.stdout)
    assert operation["verification"] == "verified"
    evidence = operation["result"]["evidence"]
    assert [one["rank"] for one in evidence] == [0, 1]
    assert len({one["sha256"] for one in evidence}) == 2
    assert {one["state"] for one in operation["ranks"]} == {"committed"}
    assert await said(bridge) != before
    found = await bridge.gateway.get(f"/v1/engines/{ENGINE}")
    assert found["facts"]["weights"]["version"] == "v2"
    refused = await asyncio.to_thread(
        command, bridge, f"--disk={standing.folder}", "--weight-version=v3"
    )
    assert refused.returncode == 3, refused
    error = json.loads(refused.stdout)["error"]
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "SOURCE_REFUSED")


async def test_trainer_publishes_step_by_step(
    bridge: Bridge, standing: Stack, first: Path, port: int
) -> None:
    """What the engine then says is what a fresh one says that has the last step's weights."""
    saved = Path(await asyncio.to_thread(shutil.copytree, first, standing.folder / "trained"))
    before = await said(bridge)
    arguments = (f"--port={port}", f"--save-to={saved}", "--steps=2", "--run=r1")
    trained = await asyncio.to_thread(train, bridge, first, *arguments)
    assert trained.returncode == 0, trained
    assert "step 2: served by rank 0" in trained.stdout
    found = await bridge.gateway.get(f"/v1/engines/{ENGINE}")
    assert found["facts"]["weights"]["version"] == "r1-step-2"
    assert found["facts"]["admission"] == "open"
    after = await said(bridge)
    assert after != before
    assert after == await said_afresh(saved)


async def said_afresh(checkpoint: Path) -> str:
    folder = checkpoint.parent
    process = Process("fresh", [], folder / "fresh.log", folder)
    process.arguments = [
        "engine",
        f"--data-dir={folder / 'fresh'}",
        f"--checkpoint={checkpoint}",
        "--inference-address=127.0.0.1:0",
        "--admin-address=127.0.0.1:0",
        "--tensor-parallel-size=2",
        "--insecure-loopback",
        f"--ready-file={folder / 'fresh.json'}",
    ]
    with cleaned(process):
        process.start()
        ready = await asyncio.to_thread(process.ready, folder / "fresh.json")
        heard = await talk(ready["inference_address"], "", "the bridge rings", **WANTED).over()
        assert heard.error is None
        return heard.text


async def test_trainer_that_never_joins(
    bridge: Bridge, standing: Stack, first: Path, port: int, tmp_path: Path
) -> None:
    before = await said(bridge)
    processes = descendants(standing.engine.pid)
    (tmp_path / "source.json").write_text(json.dumps(await source_of(first, port)))
    arguments = (f"--source={tmp_path / 'source.json'}", "--weight-version=v9")
    ordered = asyncio.create_task(
        asyncio.to_thread(command, bridge, *arguments, "--deadline-ms=5000")
    )
    assert await said(bridge) == before  # while it waits
    ended = await ordered
    assert ended.returncode == 3, ended
    error = json.loads(ended.stdout)["error"]
    assert error["reason"] == "TRANSFER_FAILED"
    assert "rank 0" in error["message"]
    assert error["retryable"]
    assert await said(bridge) == before
    assert descendants(standing.engine.pid) == processes


@pytest.mark.long
async def test_source_file_of_the_command(
    bridge: Bridge, first: Path, other: Path, port: int, tmp_path: Path
) -> None:
    """With a group as RL frameworks make it, beside one that the trainer has already."""
    tensors = tensors_of(other)
    source = await source_of(first, port)
    source["distributed"]["group"] = GROUP
    (tmp_path / "source.json").write_text(json.dumps(source))
    arguments = (f"--source={tmp_path / 'source.json'}", "--weight-version=v11")
    with trainer(2, lambda one: one.send(*tensors.values()), port):
        ended = await asyncio.to_thread(command, bridge, *arguments)
    assert ended.returncode == 0, ended
    sent = json.loads(ended.stdout)["result"]["evidence"]
    ended = await asyncio.to_thread(command, bridge, f"--disk={other}", "--weight-version=v12")
    assert json.loads(ended.stdout)["result"]["evidence"] == sent


@pytest.mark.long
async def test_trainer_that_is_refused(bridge: Bridge, first: Path, port: int) -> None:
    refused = await asyncio.to_thread(train, bridge, first, f"--port={port + 1}")
    assert refused.returncode == 1
    assert "not on the engine's list" in refused.stderr


@pytest.mark.long
async def test_engine_that_is_killed_while_it_waits_for_a_trainer(
    bridge: Bridge, standing: Stack, first: Path, port: int
) -> None:
    before = await said(bridge)
    body = {"source": await source_of(first, port), "weight_version": "v10", "pause": "keep"}
    operation = await bridge.accepted("update-weights", body)
    family = await asyncio.to_thread(receiving, standing.engine.pid)
    await asyncio.to_thread(standing.engine.kill)
    assert await asyncio.to_thread(gone, family) == set()
    await asyncio.to_thread(standing.start_engine)
    ended = await bridge.gateway.ended(operation["id"])
    assert (ended["state"], ended["error"]["reason"]) == ("failed", "ENGINE_RESTARTED")
    await bridge.gateway.open_again(ENGINE)
    assert await said(bridge) != before  # its first weights, and no others


def receiving(engine: int) -> set[int]:
    """Every process of the engine, once there is one that receives weights."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        family = descendants(engine)
        for pid in family:
            with contextlib.suppress(OSError):
                if b"transfer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return family
        time.sleep(POLL_S)
    raise AssertionError("nothing receives weights")


async def source_of(checkpoint: Path, port: int) -> dict[str, Any]:
    return {
        "distributed": {
            "backend": "gloo",
            "address": "127.0.0.1",
            "port": port,
            "world_size": 3,
            "rank_offset": 1,
            "group": "weights",
            "tensors": await asyncio.to_thread(specs, checkpoint / FILE),
        }
    }


def specs(file: Path) -> list[dict[str, Any]]:
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    return [
        {"name": name, "dtype": "float32", "shape": one["shape"]}
        for name, one in header.items()
        if name != "__metadata__"
    ]
