"""SGLang's endpoints in front of vLLM's own control service: another engine, and another way to
it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.rpc.vllm import control_pb2 as pb
from tests.doubles.sglang_trainers import GROUP
from tests.doubles.vllm_control import VllmControl, running_controls
from tests.http.compat.calling import Calling, registered
from tests.http.gateway import ENGINE_ID, gateway

pytestmark = [pytest.mark.anyio, pytest.mark.long]


@dataclass
class Behind(Calling):
    control: VllmControl


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[Behind]:
    compat = {"layer": "sglang", "engines": (ENGINE_ID,)}
    async with (
        gateway(tmp_path, registered=False, compat=(compat,)) as gate,
        running_controls() as (running,),
        registered(gate, "sglang", running.address, dialect="vllm") as http,
    ):
        yield Behind(gate, http, running.control)


async def test_pauses_memory_and_a_version(behind: Behind) -> None:
    control = behind.control
    await behind.does("pause_generation", {"mode": "in_place"})
    assert (control.paused, control.mode) == (True, pb.PAUSE_MODE_KEEP)
    await behind.does("continue_generation", {})
    for _ in range(2):
        await behind.does("release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    assert (await behind.http.get("ready")).status_code == 503
    await behind.does("resume_memory_occupation", {"tags": ["weights"]})
    await behind.does("resume_memory_occupation", {"tags": ["kv_cache"]})
    assert (await behind.http.get("ready")).status_code == 200
    assert control.generate() == "tokens"
    told = await behind.does("update_weight_version", {"new_version": "step-3"})
    assert (told["success"], told["new_version"]) == (True, "step-3")
    answer = await behind.http.get("get_weight_version")
    assert answer.json() == {"weight_version": "step-3"}


async def test_another_engine_s_group_is_not_joined(behind: Behind) -> None:
    """vLLM's is without a name, and by NCCL: it could not meet a trainer for SGLang."""
    for other in ({}, {"backend": "nccl"}):
        sent = {**GROUP, "world_size": 2, **other}
        refused = await behind.http.post("init_weights_update_group", json=sent)
        assert refused.status_code == 400, refused.text
        assert refused.json()["success"] is False
    assert behind.control.named("InitWeightTransferEngine") == []


async def test_what_that_service_does_not_have(behind: Behind) -> None:
    for path in ("flush_cache", "start_profile", "pd_role_switch", "update_weights_from_disk"):
        assert (await behind.http.post(path, json={})).status_code == 404, path
    for path, body in (
        ("release_memory_occupation", {"tags": ["weights"]}),
        ("abort_request", {"abort_all": True}),
    ):
        refused = await behind.http.post(path, json=body)
        assert (refused.status_code, list(refused.json())) == (400, ["error"]), path
    assert behind.control.generate() == "tokens"
