"""The endpoint layer over real vLLM: trainers whose base URL is all that changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from tests.doubles.trainers import Step, Wire, prime_rl, trl
from tests.real.asking import Said, generate, post, streaming
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
    of_b: Said, rust_engine: Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx2.AsyncClient]:
    with gateway(tmp_path_factory.mktemp("gateway"), LAYER) as serving_:
        async with serving_.client:
            await register(serving_, rust_engine.control, "vllm")
            async with httpx2.AsyncClient(
                base_url=f"{serving_.url}/compat/vllm/{ENGINE}/",
                headers=serving_.client.headers,
                timeout=120,
            ) as client:
                yield client


@pytest.mark.parametrize("times", [1, 2])
async def test_trl(
    http: httpx2.AsyncClient, rust_engine: Server, models: Path, of_b: Said, times: int
) -> None:
    """Under a request that is frozen at each step and goes on with the new weights."""
    of_a = generate(rust_engine)
    steps = [Step(f"step-{n}", [{"path": str(models / n)}]) for n in ("b", "a", "b-sharded")]
    with streaming(rust_engine) as stream:
        wire = Wire(http, times)
        assert await trl(wire, steps) == 1
        assert set(wire.statuses) == {200}
    assert (stream.finish, stream.error) == ("length", None)
    assert (await http.get("weight_info")).json() == {"weight_version": "step-b-sharded"}
    # The prefix cache has what the earlier weights computed: as with vLLM itself, keep keeps it.
    post(rust_engine, "/reset_prefix_cache")
    assert generate(rust_engine) == of_b
    assert await trl(Wire(http), [Step("step-4", [{"path": str(models / "a")}])]) == 1
    post(rust_engine, "/reset_prefix_cache")
    assert generate(rust_engine) == of_a


async def test_prime_rl(http: httpx2.AsyncClient, rust_engine: Server, models: Path) -> None:
    await prime_rl(Wire(http, 2), Step("step-5", [{"path": str(models / "a")}]))
    assert (await http.get("weight_info")).json() == {"weight_version": "step-5"}
    assert rust_engine.is_alive()
