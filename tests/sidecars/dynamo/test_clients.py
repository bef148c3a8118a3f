"""Clients of Dynamo's workers, beside the sidecar and through the gateway."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.doubles.trainers import Step, Wire, prime_rl_adapter_by_dynamo, prime_rl_by_dynamo
from tests.enginekit.client import until
from tests.http.gateway import ENGINE_ID, gateway
from tests.sidecars.dynamo.over import administered, over_worker

from app.sidecars.allowed import Allowed  # isort: skip
from tests.doubles.dynamo_http import running_worker  # isort: skip

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_prime_rl_by_the_worker_s_own_routes(tmp_path: Path, times: int) -> None:
    """Nothing of it comes through the sidecar, which follows what it can read."""
    async with (
        over_worker(tmp_path, "vllm-sidecar") as (double, client, _),
        httpx2.AsyncClient(base_url=f"{double.url}/", trust_env=False) as http,
    ):
        before = (await client.profile()).revision
        wire = Wire(http, times)
        await prime_rl_by_dynamo([wire], Step("v2", [{"names": ["a"]}]))
        assert set(wire.statuses) == {200}

        async def seen() -> bool:
            return (await client.profile()).state.weights.version == "v2"

        await until(seen)
        assert (await client.profile()).revision > before
        assert await client.admission() == "open"
        await http.post("engine/control/pause_generation", json={"mode": "keep"})

        async def paused() -> bool:
            return await client.admission() == "paused"

        await until(paused)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
async def test_prime_rl_with_an_adapter(tmp_path: Path, times: int) -> None:
    """Its pauses go to the layer, by what discovery calls the address of administration."""
    compat = {"layer": "vllm", "engines": (ENGINE_ID,), "flavour": "0.32"}
    lora = tmp_path / "lora"
    lora.mkdir()
    async with (
        running_worker() as double,
        administered(double, tmp_path / "sidecar", allowed=Allowed(lora_roots=(lora,))) as (
            sidecar,
            _,
        ),
        gateway(tmp_path / "data", registered=False, compat=(compat,)) as gate,
    ):
        address = sidecar.admin_address
        body = {"id": ENGINE_ID, "members": [{"rank": 0, "admin": address, "control": address}]}
        made = await gate.http.post("/v1/engines", json=body, headers=gate.auth())
        assert made.status_code == 201, made.text
        await gate.rooms.fleet.discover(ENGINE_ID)
        layer = f"{gate.url}/compat/vllm/{ENGINE_ID}/"
        async with (
            httpx2.AsyncClient(base_url=layer, headers=gate.auth(), timeout=60) as admin,
            httpx2.AsyncClient(base_url=f"{double.url}/", trust_env=False) as system,
        ):
            to_admin, to_system = Wire(admin, times), Wire(system, times)
            await prime_rl_adapter_by_dynamo(to_admin, to_system, "one", lora.as_uri())
        assert set(to_admin.statuses) | set(to_system.statuses) == {200}
        assert double.worker.state == "open"
        assert double.worker.loras["one"][1] == lora.as_uri()
        answer = await gate.get(f"/v1/operations?engine={ENGINE_ID}")
        kinds = [one["kind"] for one in answer.json()["items"]]
        assert kinds == ["resume", "pause"]
