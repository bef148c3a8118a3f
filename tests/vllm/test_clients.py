"""Trainers and controllers over the layer and the sidecar, whose base URL is all that changed.

On a CPU vLLM gives no memory back; the states and the answers of a sleep are its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from tests.doubles.trainers import (
    Step,
    Wire,
    fast_model_actuation,
    prime_rl,
    skyrl,
    skyrl_by_method,
    trl,
)
from tests.real.asking import Said, generate, post
from tests.real.beside import beside
from tests.real.gateway import ENGINE, gateway, register
from tests.real.servers import Server
from tests.vllm.servers import serving
from tests.vllm.test_harm import LAYER

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def of_b(models: Path) -> Said:
    with serving(models / "b") as server:
        return generate(server)


@pytest.fixture(scope="module")
async def http(
    of_b: Said, python_engine: Server, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx2.AsyncClient]:
    folder = tmp_path_factory.mktemp("gateway")
    with (
        beside(python_engine, folder, models, "--sleep-unconfigured") as sidecar,
        gateway(folder, LAYER) as bridge,
    ):
        async with bridge.client:
            await register(bridge, sidecar.admin, "openengine")
            async with httpx2.AsyncClient(
                base_url=f"{bridge.url}/compat/vllm/{ENGINE}/",
                headers=bridge.client.headers,
                timeout=300,
            ) as client:
                yield client


@pytest.mark.parametrize("times", [1, 2])
async def test_trl(
    http: httpx2.AsyncClient, python_engine: Server, models: Path, of_b: Said, times: int
) -> None:
    steps = [Step(f"{name}-{times}", [{"path": str(models / name)}]) for name in ("a", "b")]
    wire = Wire(http, times)
    assert await trl(wire, steps) == 1
    assert set(wire.statuses) == {200}
    assert (await http.get("weight_info")).json() == {"weight_version": f"b-{times}"}
    post(python_engine, "/reset_prefix_cache")
    assert generate(python_engine) == of_b


@pytest.mark.parametrize("times", [1, 2])
async def test_prime_rl(
    http: httpx2.AsyncClient, python_engine: Server, models: Path, times: int
) -> None:
    step = Step(f"prime-{times}", [{"path": str(models / "a")}])
    await prime_rl(Wire(http, times), step)
    assert (await http.get("weight_info")).json() == {"weight_version": f"prime-{times}"}
    assert python_engine.is_alive()


@pytest.mark.parametrize("times", [1, 2])
async def test_skyrl(http: httpx2.AsyncClient, python_engine: Server, times: int) -> None:
    await skyrl(Wire(http, times))
    assert (await http.get("is_sleeping")).json() == {"is_sleeping": False}
    assert (await skyrl_by_method(Wire(http, times))).status_code == 403
    assert python_engine.is_alive()


@pytest.mark.parametrize("times", [1, 3])
async def test_fast_model_actuation(
    http: httpx2.AsyncClient, python_engine: Server, times: int
) -> None:
    assert await fast_model_actuation(Wire(http, times)) == [True, False]
    assert python_engine.is_alive()


async def test_asleep_no_resume_and_no_update(
    http: httpx2.AsyncClient, python_engine: Server
) -> None:
    """vLLM resumes then on memory that is not there, and updates weights that are not there."""
    assert (await http.post("sleep?level=1")).status_code == 200
    assert (await http.post("resume")).status_code == 409
    await http.post("init_weight_transfer_engine", json={"init_info": {}})
    assert (await http.post("start_weight_update")).status_code == 409
    assert (await http.post("wake_up")).status_code == 200
    assert python_engine.is_alive()
