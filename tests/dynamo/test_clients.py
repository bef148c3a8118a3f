"""prime-rl with Dynamo's own runtime, beside the sidecar and through the gateway."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.doubles.trainers import Step, Wire, prime_rl_adapter_by_dynamo, prime_rl_by_dynamo
from tests.dynamo.conftest import PATH
from tests.dynamo.servers import serving
from tests.real.beside import beside
from tests.real.gateway import ENGINE, gateway, register
from tests.sidecars.checkpoints import checkpoint

pytestmark = pytest.mark.anyio

LAYER = f'[[compat]]\nlayer = "vllm"\nengines = ["{ENGINE}"]\nflavour = "0.32"\n'


async def test_by_the_worker_s_own_routes(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "files" / "a", 1)
    with (
        serving("vllm-sidecar") as worker,
        beside(worker, tmp_path, model.parent) as sidecar,
        gateway(tmp_path) as front,
    ):
        async with (
            front.client,
            httpx2.AsyncClient(base_url=f"{worker.url}/", trust_env=False) as http,
        ):
            await register(front, sidecar.admin, "openengine")
            wire = Wire(http)
            await prime_rl_by_dynamo([wire], Step("v2", [{"names": ["a"]}]))
            assert set(wire.statuses) == {200}
            found = await front.until(PATH, lambda it: it["facts"]["weights"]["version"] == "v2")
            assert found["facts"]["admission"] == "open"
            await http.post("engine/control/pause_generation", json={"mode": "keep"})
            found = await front.until(PATH, lambda it: it["facts"]["admission"] == "paused")
            assert found["facts"]["pause"]["by"] == "external"


async def test_with_an_adapter(tmp_path: Path) -> None:
    lora = tmp_path / "files" / "lora"
    lora.mkdir(parents=True)
    with (
        serving("vllm") as worker,
        beside(worker, tmp_path, lora.parent) as sidecar,
        gateway(tmp_path, LAYER) as front,
    ):
        async with (
            front.client,
            httpx2.AsyncClient(base_url=f"{worker.url}/", trust_env=False) as system,
            httpx2.AsyncClient(
                base_url=f"{front.url}/compat/vllm/{ENGINE}/",
                headers=front.client.headers,
                timeout=60,
            ) as admin,
        ):
            await register(front, sidecar.admin, "openengine")
            await prime_rl_adapter_by_dynamo(Wire(admin, 2), Wire(system, 2), "one", lora.as_uri())
            await front.until(
                PATH, lambda it: [one["name"] for one in it["facts"]["loras"]] == ["one"]
            )
            assert worker.state()["state"] == "open"
