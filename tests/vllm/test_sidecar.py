"""The sidecar beside vLLM's Python server, and the gateway in front of both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.driving import Gateway
from tests.real.asking import Said, generate
from tests.real.beside import Sidecar, beside
from tests.real.gateway import ENGINE, gateway, register
from tests.real.orders import Orders
from tests.real.servers import Server
from tests.vllm.servers import serving

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def of_b(models: Path) -> Said:
    with serving(models / "b") as server:
        return generate(server)


@pytest.fixture(scope="module")
def engine(of_b: Said, models: Path) -> Iterator[Server]:
    with serving(models / "a") as server:
        yield server


@pytest.fixture(scope="module")
def sidecar(
    engine: Server, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    with beside(engine, tmp_path_factory.mktemp("sidecar"), models) as running:
        yield running


@pytest.fixture(scope="module")
async def bridge(
    sidecar: Sidecar, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway")) as serving_:
        async with serving_.client:
            await register(serving_, sidecar.admin, "openengine")
            yield serving_


async def test_flushed(bridge: Gateway) -> None:
    await bridge.does(ENGINE, "flush-caches", {"caches": ["prefix", "multimodal", "encoder"]})


class TestOrders(Orders):
    request_id = "chatcmpl-{}"
