"""The endpoints in front of vLLM's own control service: the same calls, and another way to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import pytest

from app.rpc.vllm import control_pb2 as pb
from tests.doubles.trainers import Step, Wire, colocated, fast_model_actuation, skyrl, trl
from tests.doubles.vllm_control import VllmControl, running_controls
from tests.enginekit.client import until as settled
from tests.http.compat.calling import Calling, registered
from tests.http.gateway import ENGINE_ID, gateway

pytestmark = [pytest.mark.anyio, pytest.mark.long]


@dataclass
class Behind(Calling):
    control: VllmControl


@pytest.fixture
async def vllm(tmp_path: Path) -> AsyncIterator[Behind]:
    compat = {"layer": "vllm", "engines": (ENGINE_ID,), "flavour": "0.32"}
    async with (
        gateway(tmp_path, registered=False, compat=(compat,)) as gate,
        running_controls() as (running,),
        registered(gate, "vllm", running.address, dialect="vllm") as http,
    ):
        yield Behind(gate, http, running.control)


async def test_a_pause_and_a_resume(vllm: Behind) -> None:
    assert await vllm.does("pause?mode=keep") == {"status": "paused"}
    assert (vllm.control.paused, vllm.control.mode) == (True, pb.PAUSE_MODE_KEEP)
    assert await vllm.does("pause?mode=keep") == {"status": "paused"}
    assert len(vllm.control.named("PauseGeneration")) == 1
    assert await vllm.reads("is_paused") == {"is_paused": True}
    assert await vllm.does("resume") == {"status": "resumed"}
    assert vllm.control.generate() == "tokens"


async def test_a_pause_that_waits_is_not_lifted_before_it_holds(vllm: Behind) -> None:
    """This service shows nothing of it before its end."""
    ends = vllm.control.hangs["PauseGeneration"] = asyncio.Event()
    waiting = asyncio.create_task(vllm.http.post("pause?mode=wait"))
    await settled(lambda: vllm.control.named("PauseGeneration"))
    assert (await vllm.http.post("resume")).status_code == 409
    del vllm.control.hangs["PauseGeneration"]
    ends.set()
    assert (await waiting).status_code == 200
    assert await vllm.does("resume") == {"status": "resumed"}


async def test_asleep_and_awake(vllm: Behind) -> None:
    assert await vllm.does("sleep") == {"status": "sleeping", "level": 1}
    assert vllm.control.asleep == {"weights", "kv_cache"}
    refused = await vllm.http.post("resume")
    assert refused.status_code == 409
    told = await vllm.does("wake_up?tags=weights")
    assert told == {"status": "sleeping", "tags": ["weights"]}
    assert await vllm.does("wake_up") == {"status": "awake", "tags": None}
    assert vllm.control.generate() == "tokens"


async def test_clients(vllm: Behind) -> None:
    assert await fast_model_actuation(Wire(vllm.http)) == [True, False]
    assert await fast_model_actuation(Wire(vllm.http, times=2)) == [True, False]
    with pytest.raises(httpx2.HTTPStatusError):  # there is no order for its caches
        await skyrl(Wire(vllm.http))


async def test_requests_are_aborted_by_name_alone(vllm: Behind) -> None:
    vllm.control.running = {"a", "b"}
    told = await vllm.does("abort_requests", {"request_ids": ["a"]})
    assert told == {"status": "aborted", "aborted": 0, "unverified": 1}
    refused = await vllm.http.post("abort_requests", json={})
    assert refused.status_code == 501
    assert refused.json()["error"].startswith("Failed to abort requests: ")
    assert vllm.control.running == {"b"}


async def test_a_version_and_an_adapter(vllm: Behind) -> None:
    told = await vllm.does("update_weight_version", {"new_version": "step-3"})
    assert told == {"success": True, "new_version": "step-3"}
    assert await vllm.reads("weight_info") == {"weight_version": "step-3"}
    load = {"lora_name": "a", "lora_path": "/adapters/a"}
    told = await vllm.does("v1/load_lora_adapter", load)
    assert told == "Success: LoRA adapter 'a' added successfully."
    told = await vllm.does("v1/unload_lora_adapter", {"lora_name": "a"})
    assert told == "Success: LoRA adapter 'a' removed successfully."


async def test_a_group_is_joined_once_and_kept(vllm: Behind) -> None:
    """As long as its trainer waits for it in its own part, and before any pause."""
    opens = vllm.control.hangs["InitWeightTransferEngine"] = asyncio.Event()
    group = {"master_address": "::1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    tensors = {"dtype_names": ["bfloat16"], "shapes": [[2]], "packed": True}
    steps = [Step(f"step-{n}", [{"names": [name], **tensors} for name in "ab"]) for n in (1, 2)]
    wire = Wire(vllm.http)
    training = asyncio.create_task(trl(wire, steps, group))
    await settled(lambda: vllm.control.named("InitWeightTransferEngine"))
    assert wire.statuses == [200]  # the world size
    opens.set()
    await training
    assert set(wire.statuses) == {200}
    assert len(vllm.control.named("InitWeightTransferEngine")) == 1
    assert vllm.control.orders.count("UpdateWeights") == 4
    assert vllm.control.weight_version == "step-2"
    assert vllm.control.generate() == "tokens"
    audit = (await vllm.gate.get("/v1/audit")).json()["items"]
    assert [one["outcome"] for one in audit if one["action"] == "join_group"] == ["accepted"]
    # A trainer that has begun anew opens another one, and so does an engine that has.
    await trl(wire, [steps[0]], group)
    assert len(vllm.control.named("InitWeightTransferEngine")) == 2
    vllm.control.start()
    await vllm.gate.rooms.fleet.discover(ENGINE_ID)
    await vllm.does("pause?mode=keep")
    await vllm.does("start_weight_update")
    await settled(lambda: len(vllm.control.named("InitWeightTransferEngine")) == 3)


async def test_a_group_is_joined_by_one_of_many_calls(vllm: Behind) -> None:
    opens = vllm.control.hangs["InitWeightTransferEngine"] = asyncio.Event()
    group = {"master_address": "::1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    path, body = "init_weight_transfer_engine", {"init_info": group}
    calls = [asyncio.create_task(vllm.http.post(path, json=body)) for _ in range(3)]
    await settled(lambda: vllm.control.named("InitWeightTransferEngine"))
    calls.append(asyncio.create_task(vllm.http.post(path, json=body)))
    opens.set()
    assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
    assert len(vllm.control.named("InitWeightTransferEngine")) == 1
    # Not while another order is at work.
    goes = vllm.control.hangs["PauseGeneration"] = asyncio.Event()
    pausing = asyncio.create_task(vllm.http.post("pause?mode=keep"))
    await settled(lambda: vllm.control.named("PauseGeneration"))
    busy = await vllm.http.post(path, json=body)
    assert busy.status_code == 503
    goes.set()
    assert (await pausing).status_code == 200


async def test_colocated(vllm: Behind) -> None:
    group = {"master_address": "::1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    await vllm.does("init_weight_transfer_engine", {"init_info": group})
    tensors = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]]}
    told = await colocated(Wire(vllm.http), Step("step-1", [tensors]))
    assert told == ["sleeping", "awake"]
    assert vllm.control.generate() == "tokens"


async def test_a_group_that_is_not_joined(vllm: Behind) -> None:
    group = {"master_address": "::1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    vllm.control.fails["InitWeightTransferEngine"] = [(grpc.StatusCode.INTERNAL, "nccl")]
    failed = await vllm.http.post("init_weight_transfer_engine", json={"init_info": group})
    assert failed.status_code == 500
    small = {**group, "world_size": 1}
    refused = await vllm.http.post("init_weight_transfer_engine", json={"init_info": small})
    assert refused.status_code == 400
    vllm.control.transfer = ""
    files = await vllm.http.post("init_weight_transfer_engine", json={"init_info": {}})
    assert files.status_code in (400, 404)


async def test_what_that_service_does_not_have_is_not_there(vllm: Behind) -> None:
    for path in (
        "reset_prefix_cache",
        "start_profile",
        "scale_elastic_ep",
        "release_kv_cache_memory",
    ):
        assert (await vllm.http.post(path)).status_code == 404
    assert await vllm.reads("version") == {"version": "0.32.0"}
    assert await vllm.reads("get_world_size") == {"world_size": 1}
