"""`vllm.Control` over the kit: calls without keys become orders like any other, and where vLLM
would do harm the engine refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from app.domain.kinds import OperationKind
from app.enginekit.server import KitSettings, SettingsError
from app.rpc.vllm import control_pb2 as pb
from app.rpc.vllm.control_pb2_grpc import ControlStub
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, client_of, refused, until
from tests.enginekit.full_engine import FullEngine
from tests.enginekit.minimal_engine import MinimalEngine, fault
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


class Vllm:
    """One stub; each call with its deadline."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = ControlStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    def __getattr__(self, rpc: str) -> Any:
        def call(**fields: Any) -> Any:
            request = getattr(pb, f"{rpc}Request")(**fields)
            return getattr(self._stub, rpc)(request, timeout=30)

        return call


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    async with running_engine(
        tmp_path / "engine",
        make_engine=lambda: FullEngine(world_size=2),
        vllm_control_address="127.0.0.1:0",
    ) as running:
        yield running


@pytest.fixture
def engine(double: EngineDouble) -> FullEngine:
    assert isinstance(double.engine, FullEngine)
    return double.engine


@pytest.fixture
async def vllm(double: EngineDouble) -> AsyncIterator[Vllm]:
    address = double.server.vllm_control_address
    assert address is not None
    async with grpc.aio.insecure_channel(address) as channel:
        yield Vllm(channel)


def disk(path: str, **more: Any) -> bytes:
    return json.dumps({"path": path, **more}).encode()


async def test_what_it_says_of_itself(vllm: Vllm, double: EngineDouble) -> None:
    server = await vllm.GetServerInfo()
    assert server.instance_id == double.instance_id
    assert server.rl_capabilities.weight_transfer_backend == "disk"
    assert server.rl_capabilities.sleep_mode_enabled
    assert not server.rl_capabilities.draft_weight_updates_enabled
    assert (await vllm.GetModelInfo()).served_model_name
    health = await vllm.health.Check(health_pb2.HealthCheckRequest(service="vllm.Control"))
    assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_pauses_are_orders(vllm: Vllm, client: Client) -> None:
    before = await client.profile()
    await vllm.PauseGeneration(mode=pb.PAUSE_MODE_KEEP)
    assert (await vllm.IsPaused()).paused
    assert (await vllm.IsSleeping()).sleeping  # as vLLM has it
    after = await client.profile()
    assert after.pause_epoch == before.pause_epoch + 1
    await vllm.ResumeGeneration()
    assert not (await vllm.IsPaused()).paused
    await vllm.ResumeGeneration()  # nothing to lift
    seen = await refused(vllm.PauseGeneration(mode=7))
    assert seen.code is Code.INVALID_ARGUMENT


async def test_a_pause_drops_the_prefix_cache_unless_told_otherwise(
    vllm: Vllm, engine: FullEngine
) -> None:
    def flushes() -> int:
        prepared = {call.operation_id: call.kind for call in engine.calls}
        return list(prepared.values()).count(OperationKind.FLUSH_CACHES)

    await vllm.PauseGeneration(clear_cache=False)
    await vllm.PauseGeneration(mode=pb.PAUSE_MODE_KEEP)
    assert flushes() == 0
    await vllm.ResumeGeneration()
    await vllm.PauseGeneration()
    assert flushes() == 1


async def test_asleep_and_awake_in_steps(vllm: Vllm) -> None:
    await vllm.Sleep()
    assert (await vllm.IsSleeping()).sleeping
    seen = await refused(vllm.ResumeGeneration())
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "RESOURCES_RELEASED")
    await vllm.WakeUp(tags=["weights"])
    assert (await vllm.IsPaused()).paused
    seen = await refused(vllm.WakeUp(tags=["weights,kv_cache"]))
    assert seen.code is Code.INVALID_ARGUMENT
    await vllm.WakeUp(tags=["kv_cache"])
    assert not (await vllm.IsSleeping()).sleeping


async def test_weights_that_were_given_up_come_before_the_resume(vllm: Vllm) -> None:
    await vllm.Sleep(level=2)
    await vllm.WakeUp(tags=["weights"])
    await vllm.StartWeightUpdate()
    await vllm.UpdateWeights(update_info_json=disk("/weights/v2"))
    await vllm.FinishWeightUpdate(weight_version="v2")
    await vllm.WakeUp()
    assert not (await vllm.IsPaused()).paused
    assert (await vllm.GetWeightVersion()).weight_version == "v2"
    seen = await refused(vllm.Sleep(level=3))
    assert seen.code is Code.INVALID_ARGUMENT


async def test_an_update_is_one_order(vllm: Vllm, client: Client, engine: FullEngine) -> None:
    await vllm.PauseGeneration()
    await vllm.InitWeightTransferEngine(init_info_json=b"{}")
    await vllm.StartWeightUpdate()
    digests = {"model.safetensors": "ab" * 32}
    payload = disk("/weights/v9", files=digests, check_finite=True)
    await vllm.UpdateWeights(update_info_json=payload)
    assert [held.version for held in engine.held.values()] == ["v1", "v1"]
    await vllm.FinishWeightUpdate(weight_version="v9")
    assert [held.version for held in engine.held.values()] == ["v9", "v9"]
    assert (await client.profile()).state.weights.version == "v9"
    # Without a name the weights keep the one they had.
    await vllm.StartWeightUpdate()
    await vllm.UpdateWeights(update_info_json=disk("/weights/other"))
    await vllm.FinishWeightUpdate()
    assert (await vllm.GetWeightVersion()).weight_version == "v9"


async def test_no_update_under_traffic(vllm: Vllm) -> None:
    await vllm.StartWeightUpdate()
    await vllm.UpdateWeights(update_info_json=disk("/weights/v2"))
    seen = await refused(vllm.FinishWeightUpdate(weight_version="v2"))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "NOT_PAUSED")
    assert (await vllm.GetWeightVersion()).weight_version == "v1"
    seen = await refused(vllm.FinishWeightUpdate(weight_version="v2"))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "NO_WEIGHT_UPDATE")


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{}", disk("/x", delay=1), disk("/x", files=[]), disk("/x", check_finite=1)],
)
async def test_a_payload_that_is_none_closes_the_update(vllm: Vllm, payload: bytes) -> None:
    await vllm.StartWeightUpdate()
    assert (await refused(vllm.StartWeightUpdate())).reason == "WEIGHT_UPDATE_OPEN"
    seen = await refused(vllm.UpdateWeights(update_info_json=payload))
    assert seen.code is Code.INVALID_ARGUMENT
    assert (await refused(vllm.FinishWeightUpdate(weight_version=" "))).code is (
        Code.INVALID_ARGUMENT
    )


async def test_a_rank_that_fails_is_told(vllm: Vllm, engine: FullEngine) -> None:
    await vllm.PauseGeneration()
    engine.script("prepare", fault)
    await vllm.StartWeightUpdate()
    await vllm.UpdateWeights(update_info_json=disk("/weights/v2"))
    seen = await refused(vllm.FinishWeightUpdate(weight_version="v2"))
    assert seen.code is Code.INTERNAL
    assert (await vllm.GetWeightVersion()).weight_version == "v1"


async def test_adapters(vllm: Vllm) -> None:
    loaded = await vllm.LoadLora(lora_name="tone", source_path="/loras/tone")
    assert loaded.adapter.lora_name == "tone"
    assert [one.lora_name for one in (await vllm.ListLoras()).adapters] == ["tone"]
    await vllm.UnloadLora(lora_name="tone")
    assert (await refused(vllm.UnloadLora(lora_name="tone"))).code is Code.NOT_FOUND


async def test_what_it_does_not_do(vllm: Vllm) -> None:
    for call, code in (
        (vllm.Shutdown(), Code.FAILED_PRECONDITION),
        (vllm.StartDraftWeightUpdate(), Code.FAILED_PRECONDITION),
        (vllm.UpdateWeightVersion(weight_version="v3"), Code.UNIMPLEMENTED),
        (vllm.GetKvEventSources(), Code.UNIMPLEMENTED),
        (vllm.InitWeightTransferEngine(init_info_json=b'{"roots":[]}'), Code.INVALID_ARGUMENT),
    ):
        assert (await refused(call)).code is code
    await vllm.Abort()
    await vllm.Abort(request_ids=["nobody", "nobody"])


async def test_an_engine_that_offers_little(tmp_path: Path) -> None:
    async with (
        running_engine(
            tmp_path / "engine",
            make_engine=MinimalEngine,
            vllm_control_address=f"unix:{tmp_path}/v.sock",
        ) as running,
        grpc.aio.insecure_channel(str(running.server.vllm_control_address)) as channel,
    ):
        vllm = Vllm(channel)
        assert not (await vllm.GetServerInfo()).rl_capabilities.weight_transfer_enabled
        for call in (vllm.Sleep(), vllm.WakeUp(), vllm.StartWeightUpdate(), vllm.ListLoras()):
            assert (await refused(call)).reason == "NOT_CONFIGURED"


async def test_calls_wait_for_each_other_and_a_lost_caller_lets_go(
    vllm: Vllm, engine: FullEngine
) -> None:
    let_go = asyncio.Event()
    engine.script("prepare", until_set(let_go))

    async def vllm_is_paused() -> bool:
        return bool((await vllm.IsPaused()).paused)

    first = vllm.PauseGeneration(clear_cache=False)
    await until(lambda: engine.calls)
    first.cancel()
    seen = await refused(vllm.PauseGeneration(clear_cache=False))
    assert seen.reason == "ENGINE_BUSY"
    let_go.set()
    await until(vllm_is_paused)


def test_it_is_not_served_beyond_this_machine(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="asks nobody who they are"):
        KitSettings(data_dir=tmp_path, insecure_loopback=True, vllm_control_address="0.0.0.0:9201")


async def test_it_is_not_there_unless_it_was_asked_for(tmp_path: Path) -> None:
    async with running_engine(tmp_path / "engine") as running:
        assert running.server.vllm_control_address is None
        async with client_of(running) as client:
            await client.profile()
