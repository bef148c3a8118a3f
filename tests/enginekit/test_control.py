"""Discovery, load, both kinds of health, and what no engine offers yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from app.domain.kinds import WeightsState
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import RuntimeFault
from app.rpc.openengine.v1 import kv_pb2, lifecycle_pb2, lora_pb2, model_pb2, server_pb2
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, client_of, refused, until
from tests.enginekit.minimal_engine import MODEL, fault, hang

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
INFERENCE = "openengine.v1.Inference"
ADMIN = "openengine.v1.OpenEngineAdmin"


def stubs(client: Client) -> tuple[Any, Any]:
    return client.control, client.reading


async def test_who_the_server_is(client: Client, double: EngineDouble) -> None:
    for stub in stubs(client):
        info = await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=10)
        assert (info.engine_name, info.instance_id) == ("minimal", double.instance_id)
        assert info.schema_release == "4def7c50"
        assert info.schema_revision >= info.minimum_client_revision > 0
        assert info.engine_role == server_pb2.ENGINE_ROLE_AGGREGATED
        assert list(info.supported_models) == [MODEL]
        assert info.capacity.kv_block_size == 16
        assert not info.capacity.HasField("max_loras")
        # Nothing but the presence of the admin service.
        assert json_format.MessageToDict(info.extra) == {"openengine_admin": True}


async def test_what_the_model_is(client: Client) -> None:
    for stub in stubs(client):
        for name in ("", MODEL):
            info = await stub.GetModelInfo(model_pb2.GetModelInfoRequest(model=name), timeout=10)
            assert (info.model_id, info.max_context_length) == (MODEL, 4096)
            assert not info.generation.output_logprobs.supported
        seen = await refused(
            stub.GetModelInfo(model_pb2.GetModelInfoRequest(model="other"), timeout=10)
        )
        assert (seen.code, seen.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_load_counts_what_is_held(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    await client.completed(client.pause("keep"))
    held = client.generate()
    await client.held(1)
    for stub in stubs(client):
        load = await stub.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True), timeout=10)
        assert (load.running_requests, load.queued_requests) == (1, 1)
        assert load.instance_id == double.instance_id
        assert load.timestamp_unix_nanos > 0
        assert [rank.running_requests for rank in load.ranks] == [1]
        load = await stub.GetLoad(server_pb2.GetLoadRequest(), timeout=10)
        assert load.ranks == []
    held.hang_up()
    running.hang_up()


async def test_a_read_that_an_engine_cannot_answer(client: Client, double: EngineDouble) -> None:
    for retryable, code in ((True, Code.UNAVAILABLE), (False, Code.INTERNAL)):
        double.engine.lost = RuntimeFault("RANK_LOST", "rank 0 is gone", retryable=retryable)
        seen = await refused(client.reading.GetLoad(server_pb2.GetLoadRequest(), timeout=10))
        assert (seen.code, seen.reason, seen.message) == (code, "RANK_LOST", "rank 0 is gone")


H = lifecycle_pb2.HealthState


async def core(client: Client, **fields: Any) -> lifecycle_pb2.HealthResponse:
    return await client.reading.Health(lifecycle_pb2.HealthRequest(**fields), timeout=10)


async def watch(channel: Any, service: str, into: list[str]) -> None:
    call: Any = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=service)
    )
    async for answer in call:
        into.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def test_health_follows_admission(client: Client, double: EngineDouble) -> None:
    seen: list[str] = []
    alive: list[str] = []
    watching = [
        asyncio.create_task(watch(client.inference_channel, INFERENCE, seen)),
        asyncio.create_task(watch(client.admin_channel, "", alive)),
    ]
    await until(lambda: seen == ["SERVING"] and alive == ["SERVING"])
    assert (await core(client)).state == H.HEALTH_STATE_READY
    double.engine.stall()
    running = client.generate()
    await running.first()
    draining = await client.begin(client.pause())
    await draining.next()
    assert (await core(client)).state == H.HEALTH_STATE_DRAINING
    for admin in (True, False):
        assert await client.health(INFERENCE, admin=admin) == "NOT_SERVING"
        assert await client.health(ADMIN, admin=admin) == "SERVING"
        assert await client.health("", admin=admin) == "SERVING"
    double.engine.go()
    paused = (await draining.end()).completed.pause
    response = await core(client)
    assert response.state == H.HEALTH_STATE_NOT_READY
    assert {check.name: check.message for check in response.checks}["admission"] == "paused"
    await client.completed(client.resume(paused.pause_epoch))
    await until(lambda: seen == ["SERVING", "NOT_SERVING", "SERVING"])
    assert alive == ["SERVING"]
    assert (await core(client)).state == H.HEALTH_STATE_READY
    for task in watching:
        task.cancel()


async def test_health_of_a_service_that_is_not_there(client: Client) -> None:
    seen = await refused(
        health_pb2_grpc.HealthStub(client.admin_channel).Check(
            health_pb2.HealthCheckRequest(service="other"), timeout=10
        )
    )
    assert seen.code is Code.NOT_FOUND


async def test_weights_that_are_not_valid_take_the_engine_out_of_service(
    client: Client, double: EngineDouble
) -> None:
    before = (await client.profile()).revision
    double.engine.weights_become(WeightsState.MISSING)

    async def noticed() -> bool:
        return await client.health(INFERENCE) == "NOT_SERVING"

    await until(noticed)
    assert (await core(client)).state == H.HEALTH_STATE_NOT_READY
    assert (await client.generate().refused()).reason == "OUT_OF_SERVICE"
    assert (await client.profile()).revision == before + 1
    double.engine.weights_become(WeightsState.VALID)
    assert (await client.profile()).revision == before + 2
    assert await client.generate().finish_reason() == "LENGTH"


async def test_a_runtime_that_cannot_be_observed_is_not_ready(
    client: Client, double: EngineDouble
) -> None:
    before = (await client.profile()).revision

    async def broken() -> None:
        raise ZeroDivisionError("secret detail of the engine")

    double.engine.observing = broken
    assert (await core(client)).state == H.HEALTH_STATE_NOT_READY

    async def noticed() -> bool:
        return await client.health(INFERENCE) == "NOT_SERVING"

    await until(noticed)
    # It may serve all the same, and nothing that is known has changed.
    assert await client.generate().finish_reason() == "LENGTH"
    assert (await client.profile()).revision == before
    double.engine.observing = None
    assert (await core(client)).state == H.HEALTH_STATE_READY


async def test_a_lost_rank_raises_the_revision_and_shows(
    client: Client, double: EngineDouble
) -> None:
    from dataclasses import replace

    before = (await client.profile()).revision
    lost = RankReport(0, RankState.FAILED, "the process is gone")
    double.engine.observation = replace(double.engine.observation, ranks=(lost,))
    profile = await client.profile()
    assert profile.revision == before + 1
    assert [(report.rank, report.message) for report in profile.state.ranks] == [
        (0, "the process is gone")
    ]
    assert (await core(client)).state == H.HEALTH_STATE_DEGRADED


async def test_the_probe_generates_for_real(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, probe_timeout_s=0.1) as double,
        client_of(double) as client,
    ):

        async def probe() -> tuple[Any, str]:
            response = await core(client, include_inference_probe=True)
            check = {check.name: check for check in response.checks}["inference_probe"]
            assert response.state == check.state
            return check.state, check.message

        assert await probe() == (H.HEALTH_STATE_READY, "")
        double.engine.script("probe", fault, -1)
        assert await probe() == (H.HEALTH_STATE_NOT_READY, "rank -1 cannot")
        double.engine.script("probe", hang, -1)
        assert (await probe())[0] == H.HEALTH_STATE_NOT_READY
        await client.completed(client.pause())
        assert await probe() == (
            H.HEALTH_STATE_NOT_READY,
            "not run: the engine serves no requests",
        )


async def test_a_probe_for_what_is_not_here(client: Client) -> None:
    seen = await refused(client.reading.Health(lifecycle_pb2.HealthRequest(model="x"), timeout=10))
    assert seen.reason == "MODEL_NOT_FOUND"
    other = lifecycle_pb2.HealthRequest(role=server_pb2.ENGINE_ROLE_PREFILL)
    seen = await refused(client.reading.Health(other, timeout=10))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "ROLE_MISMATCH")
    unknown: Any = 77
    seen = await refused(
        client.reading.Health(lifecycle_pb2.HealthRequest(role=unknown), timeout=10)
    )
    assert seen.code is Code.INVALID_ARGUMENT


async def test_what_no_engine_offers_yet(client: Client) -> None:
    calls = [
        ("LoadLora", lora_pb2.LoadLoraRequest()),
        ("UnloadLora", lora_pb2.UnloadLoraRequest()),
        ("ListLoras", lora_pb2.ListLorasRequest()),
        ("GetKvEventSources", kv_pb2.GetKvEventSourcesRequest()),
        ("SubscribeKvEvents", kv_pb2.SubscribeKvEventsRequest()),
    ]
    for name, request in calls:
        seen = await refused(getattr(client.control, name)(request, timeout=10))
        assert (seen.code, seen.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_OPERATION"), name
        seen = await refused(getattr(client.reading, name)(request, timeout=10))
        mutation = name in ("LoadLora", "UnloadLora")
        expected = Code.PERMISSION_DENIED if mutation else Code.UNIMPLEMENTED
        assert seen.code is expected, name


async def test_each_listener_serves_its_own_services_alone(client: Client) -> None:
    from app.rpc.openengine.v1 import admin_pb2 as pb
    from app.rpc.openengine.v1 import admin_pb2_grpc, openengine_pb2_grpc
    from app.rpc.openengine.v1.generation_pb2 import GenerateRequest

    astray = admin_pb2_grpc.OpenEngineAdminStub(client.inference_channel)
    seen = await refused(astray.GetAdminProfile(pb.GetAdminProfileRequest(), timeout=10))
    assert seen.code is Code.UNIMPLEMENTED
    lost = openengine_pb2_grpc.InferenceStub(client.admin_channel)
    seen = await refused(lost.Generate(GenerateRequest(prompt="a"), timeout=10))
    assert seen.code is Code.UNIMPLEMENTED
