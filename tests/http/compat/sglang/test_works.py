"""Requests, adapters, profiles, shape, and what is told of the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.enginekit.runtime import Order, RuntimeFault
from tests.enginekit.client import client_of
from tests.enginekit.client import until as settled
from tests.http.compat.layered import Layered, layered

pytestmark = pytest.mark.anyio


async def empty(sglang: Layered, path: str, body: Any) -> bool:
    answer = await sglang.post(path, body)
    return (answer.status_code, answer.content) == (200, b"")


@pytest.mark.long
async def test_requests_are_ended_by_name_or_all(sglang: Layered) -> None:
    sglang.engine.stall()
    async with client_of(sglang.full.double) as direct:
        streams = [direct.generate(request_id=name) for name in ("r-1", "r-2", "r-3")]
        await settled(lambda: sglang.engine.running == 3)
        assert await empty(sglang, "/abort_request", {"rid": "r-1", "zzz": 1})
        assert await streams[0].finish_reason() == "CANCELLED"
        assert sglang.engine.running == 2
        assert await empty(sglang, "/abort_request", {"rid": "nobody"})
        for body in ({}, {"rid": ""}, {"rid": None}, {"rids": ["r-2"]}, {"rid": "a b"}):
            refused = await sglang.post("/abort_request", body)
            assert refused.status_code == 400, body
        assert sglang.engine.running == 2
        assert await empty(sglang, "/abort_request", {"rid": "", "abort_all": "true"})
        assert [await stream.finish_reason() for stream in streams[1:]] == ["CANCELLED"] * 2


@pytest.mark.long
async def test_adapters_come_and_go(sglang: Layered) -> None:
    body = {"lora_name": "a", "lora_path": "/l/a", "lora_id": "x"}
    told = {"rid": None, "http_worker_ipc": None, "success": True, "error_message": ""}
    for _ in range(2):
        loaded = await sglang.does("/load_lora_adapter", body)
        assert loaded == {**told, "loaded_adapters": {"a": "/l/a"}}
    listed = await sglang.reads("/v1/models")
    assert [(one["id"], one["root"], one["parent"]) for one in listed["data"]] == [
        ("tiny", "tiny", None),
        ("a", "/l/a", "tiny"),
    ]
    for _ in range(2):
        gone = await sglang.does("/unload_lora_adapter", {"lora_name": "a"})
        assert gone == {**told, "loaded_adapters": {}}
    assert await sglang.kinds() == ["load_lora", "unload_lora"]
    for path, sent in (
        ("/unload_lora_adapter", {"lora_name": "zz"}),
        ("/load_lora_adapter", {**body, "pinned": True}),
        ("/load_lora_adapter", {**body, "lora_name": "x:y"}),
        ("/load_lora_adapter", {**body, "lora_name": "tiny"}),
        ("/load_lora_adapter", {**body, "lora_path": "\n"}),
    ):
        refused = await sglang.post(path, sent)
        assert refused.status_code == 400, sent
        assert (refused.json()["success"], refused.json()["loaded_adapters"]) == (False, None)


@pytest.mark.long
async def test_a_profile_is_begun_and_stopped(sglang: Layered) -> None:
    sent = {"output_dir": None, "num_steps": None, "activities": None, "with_stack": None}
    for _ in range(2):
        started = await sglang.post("/start_profile", sent)
        assert (started.status_code, started.text) == (200, "Start profiling.\n")
    assert (await sglang.call("GET", "/stop_profile")).status_code == 200
    assert (await sglang.post("/stop_profile")).status_code == 400
    assert await sglang.kinds() == ["profile"]
    for refused in (
        {"output_dir": "/proc/nope"},
        {"start_step": 3},
        {"activities": ["ZZZ"]},
        {"activities": ["CPU", "MEM"]},
        {"num_steps": 0},
        {"profile_by_stage": True},
    ):
        assert (await sglang.post("/start_profile", refused)).status_code == 400, refused
    assert await sglang.kinds() == ["profile"]
    assert (await sglang.post("/start_profile", {"activities": ["MEM"]})).status_code == 200
    assert (await sglang.operations())[-1]["request"]["profiler"] == "memory"


@pytest.mark.long
async def test_the_shape_of_serving(sglang: Layered) -> None:
    told = await sglang.does("/pd_role_switch", {"new_role": "decode"})
    assert (told["success"], told["old_role"], told["new_role"]) == (True, "null", "decode")
    assert (await sglang.reads("/model_info"))["disaggregation_mode"] == "decode"
    refused = await sglang.post("/pd_role_switch", {"new_role": "prefill", "prepare_only": True})
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    told = await sglang.does("/scale_elastic_ep", {"new_ep_size": 4})
    assert (told["old_ep_size"], told["new_ep_size"]) == (2, 4)
    assert (await sglang.reads("/is_scaling_elastic_ep"))["is_scaling_elastic_ep"] is False
    for size in (0, True, "2", None):
        refused = await sglang.post("/scale_elastic_ep", {"new_ep_size": size})
        assert (refused.status_code, list(refused.json())) == (400, ["error"])


@pytest.mark.long
async def test_what_is_told_of_the_engine(sglang: Layered) -> None:
    info = await sglang.reads("/server_info")
    assert info == await sglang.reads("/get_server_info")
    assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (2, 1, 1)
    assert (info["disaggregation_mode"], info["encoder_only"]) == ("null", False)
    assert len(info["internal_states"]) == 1
    assert not [name for name in info if "key" in name or "token_" in name]
    assert (await sglang.reads("/get_weight_version")) == {"weight_version": "v1"}
    loads = (await sglang.reads("/v1/loads?include=core&dp_rank=0"))["loads"]
    assert loads[0]["num_running_reqs"] == 0
    assert (await sglang.reads("/v1/loads?dp_rank=7"))["loads"] == []
    assert (await sglang.call("GET", "/v1/loads?dp_rank=x")).status_code == 400


@pytest.mark.long
async def test_a_dead_engine_is_told_from_a_paused_one(sglang: Layered) -> None:
    await sglang.does("/pause_generation", {})
    for path, status in (("/health", 200), ("/health_generate", 200), ("/ready", 503)):
        answer = await sglang.call("GET", path)
        assert (answer.status_code, answer.content) == (status, b""), path
    await sglang.full.double.kill()
    for path in ("/health", "/health_generate", "/ready", "/model_info"):
        assert (await sglang.call("GET", path)).status_code == 503, path


@pytest.mark.long
async def test_calls_that_are_no_orders_are_refused_to_everybody(sglang: Layered) -> None:
    for path in ("/update_weights_from_tensor", "/weights_checker", "/set_internal_state"):
        url = f"/compat/sglang/{sglang.engine_id}{path}"
        stranger = await sglang.gate.http.post(url)
        assert (stranger.status_code, list(stranger.json())) == (401, ["error"])
        known = await sglang.post(path, {"serialized_named_tensors": ["gASV"]})
        assert (known.status_code, list(known.json())) == (403, ["error"])
        assert "www-authenticate" not in known.headers
    assert await sglang.operations() == []


@pytest.mark.long
async def test_while_another_order_runs_it_is_tried_again_later(tmp_path: Path) -> None:
    async with layered(tmp_path, layer="sglang") as sglang:
        goes = asyncio.Event()

        async def wait(_order: Any, _rank: int) -> None:
            await goes.wait()

        sglang.engine.script("commit", wait)
        first = asyncio.create_task(sglang.post("/pause_generation", {}))
        await settled(sglang.kinds)
        for path, body in (
            ("/flush_cache", None),
            ("/release_memory_occupation", {}),
            ("/update_weights_from_disk", {"model_path": "/w"}),
        ):
            busy = await sglang.post(path, body)
            assert (busy.status_code, busy.headers["retry-after"]) == (503, "1"), busy.text
        goes.set()
        assert (await first).status_code == 200


async def test_an_engine_that_is_gone_behind_its_sidecar(sglang: Layered) -> None:
    """Told as what may pass: clients that try again on 5xx do."""

    async def gone(_: Order, __: int) -> None:
        raise RuntimeFault("ENGINE_UNREACHABLE", "the engine cannot be reached", code="UNAVAILABLE")

    sglang.engine.script("prepare", gone)
    said = await sglang.post("/pause_generation", {})
    assert (said.status_code, said.json()["error"]["message"]) == (
        503, "the engine cannot be reached",
    )  # fmt: skip
