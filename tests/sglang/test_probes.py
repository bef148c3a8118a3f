"""An orchestrator that probes while the engine is paused: paused is not dead."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.driving import Gateway
from tests.real.asking import client, streaming
from tests.real.beside import Sidecar
from tests.real.gateway import ENGINE
from tests.real.orders import PATH, resume
from tests.real.servers import Server

pytestmark = pytest.mark.anyio

INFERENCE = "openengine.v1.Inference"


async def probed(address: str, service: str = "") -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await stub.Check(request, timeout=10)
    status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return status


async def test_a_pause_is_no_death(bridge: Gateway, sidecar: Sidecar, engine: Server) -> None:
    """SGLang's own `/health` takes 20 s for a 503 then, and is 503 for good until a later one goes
    well; so nothing here may ask for it under a pause."""
    layer = f"/compat/sglang/{ENGINE}"
    with streaming(engine) as stream:
        paused = await bridge.does(ENGINE, "pause", {"mode": "keep"})
        for address in (sidecar.admin, sidecar.inference):
            assert await probed(address) == "SERVING"
        for path in ("/health", "/health_generate", "/ping"):
            assert (await bridge.client.get(layer + path)).status_code == 200, path
        found = await bridge.until(PATH, lambda one: one["facts"]["admission"] == "paused")
        assert found["health"]["state"] not in ("unreachable", "dead"), found["health"]
        assert (await bridge.client.get(f"{layer}/ready")).status_code == 503
        assert client(engine).get("/ready").status_code == 503
        await resume(bridge, paused)
        assert client(engine).get("/ready").status_code == 200
        assert (await bridge.client.get(f"{layer}/ready")).status_code == 200
    assert (stream.finish, stream.error) == ("length", None)
    assert engine.is_alive()
