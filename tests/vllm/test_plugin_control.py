"""The plugin behind vLLM's Rust front end: the same over `vllm.Control`."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from app.rpc.vllm import control_pb2 as pb
from app.rpc.vllm.control_pb2_grpc import ControlStub
from tests.real.asking import Said, generate
from tests.real.servers import Server
from tests.vllm.servers import serving


@pytest.fixture(scope="module")
def of_b(models: Path) -> Said:
    """What an engine says that was started with `b`; it ends before the other starts."""
    with serving(models / "b") as server:
        return generate(server)


@pytest.mark.anyio
async def test_tokens_of_the_new_weights(of_b: Said, rust_engine: Server, models: Path) -> None:
    before = generate(rust_engine)
    async with grpc.aio.insecure_channel(rust_engine.control) as channel:
        stub = ControlStub(channel)
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
        capabilities = info.rl_capabilities
        assert capabilities.weight_transfer_enabled
        assert capabilities.weight_transfer_backend == "disk"
        await stub.InitWeightTransferEngine(
            pb.InitWeightTransferEngineRequest(init_info_json=b"{}"), timeout=60
        )
        await stub.StartWeightUpdate(pb.StartWeightUpdateRequest(), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.UpdateWeights(update_of(models / "b-without-one"), timeout=60)
        assert "(weights unchanged)" in str(refused.value)
        assert generate(rust_engine) == before
        await stub.StartWeightUpdate(pb.StartWeightUpdateRequest(), timeout=60)
        await stub.UpdateWeights(update_of(models / "b"), timeout=60)
        await stub.FinishWeightUpdate(pb.FinishWeightUpdateRequest(weight_version="v2"), timeout=60)
        version = await stub.GetWeightVersion(pb.GetWeightVersionRequest(), timeout=10)
        assert version.weight_version == "v2"
    assert generate(rust_engine) == of_b


def update_of(folder: Path) -> pb.UpdateWeightsRequest:
    return pb.UpdateWeightsRequest(update_info_json=json.dumps({"path": str(folder)}).encode())
