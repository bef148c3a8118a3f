"""The sidecar beside servers that were started otherwise: with keys, with two ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.driving import Gateway
from tests.real.beside import Sidecar, beside
from tests.real.gateway import ENGINE, gateway, register
from tests.real.orders import PATH
from tests.sglang.servers import options, serving
from tests.sglang.test_weights import from_disk, update

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def bridged(sidecar: Sidecar, folder: Path) -> AsyncIterator[Gateway]:
    (folder / "gateway").mkdir()
    with gateway(folder / "gateway") as bridge:
        async with bridge.client:
            await register(bridge, sidecar.admin, "openengine")
            yield bridge


def under_pause(path: Path, version: str) -> dict[str, Any]:
    body = update(from_disk(path), version, under_pause={})
    del body["pause"]
    return body


async def paused_updated_resumed(bridge: Gateway, path: Path, version: str) -> None:
    paused = await bridge.does(ENGINE, "pause", {"mode": "abort"})
    await bridge.does(ENGINE, "update-weights", under_pause(path, version))
    epoch = paused["result"]["pause_epoch"]
    await bridge.does(ENGINE, "resume", {"pause_epoch": epoch})


async def test_keys(models: Path, tmp_path: Path) -> None:
    """Of two keys each is refused where the other one is due; the server shows both to either."""
    (tmp_path / "key").write_text("ordinary-key-of-this-test")
    (tmp_path / "admin").write_text("admin-key-of-this-test")
    keys = ("--api-key=ordinary-key-of-this-test", "--admin-api-key=admin-key-of-this-test")
    files = (
        f"--engine-key-file={tmp_path / 'key'}",
        f"--engine-admin-key-file={tmp_path / 'admin'}",
    )
    with (
        serving(models / "a", *keys) as server,
        beside(server, tmp_path, models, *options(tmp_path), *files) as sidecar,
    ):
        async with bridged(sidecar, tmp_path) as bridge:
            await paused_updated_resumed(bridge, models / "b", "with-keys")
            await bridge.does(ENGINE, "flush-caches", {"caches": ["prefix"]})
            shown = (await bridge.client.get(PATH)).text
        body = {"model": "tiny", "prompt": "stand by", "max_tokens": 2}
        bearer = {"authorization": "Bearer ordinary-key-of-this-test"}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, headers=bearer, timeout=60)
        assert answer.status_code == 200
        said = shown + sidecar.process.said()
    assert "-key-of-this-test" not in said


async def test_two_data_parallel_ranks(models: Path, tmp_path: Path) -> None:
    """SGLang tells what the first one did. Nothing that is more than that is claimed."""
    with (
        serving(models / "a", ranks=2) as server,
        beside(server, tmp_path, models, *options(tmp_path)) as sidecar,
    ):
        async with bridged(sidecar, tmp_path) as bridge:
            flushed = await bridge.does(ENGINE, "flush-caches", {"caches": ["prefix"]})
            assert flushed["verification"] == "unverified", flushed
            paused = await bridge.does(ENGINE, "pause", {"mode": "drain"})
            body = under_pause(models / "b", "both")
            ended = await bridge.does(ENGINE, "update-weights", body)
            assert {one["rank"] for one in ended["result"]["evidence"]} == {0, 1}
            epoch = paused["result"]["pause_epoch"]
            await bridge.does(ENGINE, "resume", {"pause_epoch": epoch})
        assert server.is_alive()
