"""The endpoints in front of a sidecar that speaks SGLang's own HTTP: the same words on both sides,
and the ledger in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.sglang_http import SglangDouble
from tests.doubles.sglang_trainers import (
    GROUP,
    areal,
    nemo_rl,
    slime,
    slime_on_the_same_devices,
    verl,
)
from tests.doubles.trainers import Step, Wire
from tests.enginekit.client import until
from tests.http.compat.calling import Calling, registered
from tests.http.gateway import ENGINE_ID, gateway
from tests.sidecars.checkpoints import NAMES, checkpoint
from tests.sidecars.sglang.running import asked, served, trainer
from tests.sidecars.sidecar import Sidecar

pytestmark = [pytest.mark.anyio, pytest.mark.long]


@dataclass
class Beside(Calling):
    sglang: SglangDouble
    weights: Path
    adapter: Path
    sidecar: Sidecar

    def step(self, number: int) -> Step:
        path = checkpoint(self.weights / str(number), number)
        return Step(f"step-{number}", [{"model_path": str(path)}])


@pytest.fixture
async def beside(tmp_path: Path) -> AsyncIterator[Beside]:
    compat = {"layer": "sglang", "engines": (ENGINE_ID,)}
    async with (
        served(tmp_path) as it,
        gateway(tmp_path / "gateway", registered=False, compat=(compat,)) as gate,
        registered(gate, "sglang", it.sidecar.admin_address) as http,
    ):
        yield Beside(gate, http, it.sglang, it.root, it.adapter, it.sidecar)


@pytest.mark.parametrize("times", [1, 2])
async def test_trainers(beside: Beside, times: int) -> None:
    wire = Wire(beside.http, times)
    await areal(wire, [beside.step(3), beside.step(4)])
    await slime_on_the_same_devices(wire, beside.step(5))
    assert await beside.reads("get_weight_version") == {"weight_version": "step-5"}
    assert await verl(wire, beside.step(6)) == [403, 403]
    assert await beside.reads("get_weight_version") == {"weight_version": "step-6"}
    await nemo_rl(wire)
    # This engine keeps no copy of weights that it gives up: they come first, and then it serves.
    assert (await beside.http.get("ready")).status_code == 503
    body = {**beside.step(7).pieces[0], "weight_version": "step-7"}
    await beside.does("update_weights_from_disk", body)
    assert (await beside.http.get("ready")).status_code == 200
    assert not beside.sglang.model.dead


async def test_requests_adapters_and_what_it_is(beside: Beside) -> None:
    running = [await asked(beside.sglang, name) for name in ("a", "b")]
    assert await beside.does("abort_request", {"rid": "a"}) == ""
    assert await running[0] == "abort"
    assert await beside.does("abort_request", {"abort_all": True}) == ""
    assert await running[1] == "abort"
    assert await beside.does("flush_cache?timeout=5") == "Cache flushed.\n"
    told = await beside.does(
        "load_lora_adapter", {"lora_name": "one", "lora_path": str(beside.adapter)}
    )
    assert told["loaded_adapters"] == {"one": str(beside.adapter)}
    assert [one["id"] for one in (await beside.reads("v1/models"))["data"]][-1] == "one"
    await beside.does("unload_lora_adapter", {"lora_name": "one"})
    info = await beside.reads("server_info")
    assert (info["tp_size"], info["disaggregation_mode"]) == (1, "null")


async def test_what_would_end_the_engine_does_not(beside: Beside) -> None:
    for _ in range(2):
        assert await beside.does("resume_memory_occupation", {}) is None
    await beside.does("release_memory_occupation", {"tags": ["kv_cache"]})
    assert await beside.does("resume_memory_occupation", {"tags": ["weights"]}) is None
    assert await beside.does("resume_memory_occupation", {}) is None
    bad = beside.weights / "bad"
    bad.mkdir()
    (bad / "model.safetensors").write_bytes(b"\x80garbage")
    for path, body in (
        ("update_weights_from_disk", {"model_path": str(bad)}),
        ("update_weights_from_disk", {"model_path": str(bad), "load_format": "bogus"}),
        ("update_weights_from_disk", {"model_path": "/no/such"}),
        ("init_weights_update_group", {
            "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
            "group_name": "", "backend": "gloo",
        }),
        ("start_profile", {"output_dir": "/proc/nope"}),
    ):  # fmt: skip
        refused = await beside.http.post(path, json=body)
        assert refused.status_code == 400, (path, refused.text)
    assert (await beside.http.post("start_expert_distribution_record")).status_code == 403
    assert (await beside.http.get("ready")).status_code == 200
    assert not beside.sglang.model.dead


BUCKETS = [{"names": [name], "dtypes": ["torch.float32"], "shapes": [[2, 2]]} for name in NAMES]


@pytest.mark.parametrize("times", [1, 2])
async def test_slime_by_a_group(beside: Beside, times: int) -> None:
    """It waits in its group for the engine, which is in it over all updates."""
    steps = [Step(str(number), BUCKETS) for number in (1, 2, 3)]
    async with trainer(beside.sglang) as port:
        assert await slime(Wire(beside.http, times), steps, _group(port)) == ["1", "2", "3"]
    assert len(beside.sglang.orders("/init_weights_update_group")) == 1
    received = beside.sglang.orders("/update_weights_from_distributed")
    assert len(received) == len(steps) * len(BUCKETS)
    assert (await beside.http.get("ready")).status_code == 200


async def test_a_trainer_that_begins_anew_is_met_anew(beside: Beside) -> None:
    wire = Wire(beside.http)
    async with trainer(beside.sglang) as port:
        await slime(wire, [], _group(port))
        await beside.does("pause_generation", {})
        half = {**BUCKETS[0], "group_name": "slime-pp_0", "weight_version": "half"}
        await beside.does("update_weights_from_distributed", half)
    # It has ended in the middle. Half of an update does not serve.
    async with trainer(beside.sglang) as port:
        told = await slime(wire, [Step("whole", BUCKETS)], _group(port))
        assert told == ["whole"]
    assert len(beside.sglang.orders("/init_weights_update_group")) == 2
    assert (await beside.http.get("ready")).status_code == 200
    assert not beside.sglang.model.dead


async def test_a_group_of_another_name_is_none(beside: Beside) -> None:
    async with trainer(beside.sglang) as port:
        await beside.does("init_weights_update_group", _group(port))
        await beside.does("pause_generation", {})
        other = {**BUCKETS[0], "group_name": "other"}
        refused = await beside.http.post("update_weights_from_distributed", json=other)
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        await beside.does("continue_generation", {})


def _group(port: int) -> dict[str, Any]:
    return {**GROUP, "master_port": port, "world_size": 2}


async def test_a_sidecar_does_not_answer_for_an_engine_that_has_ended(beside: Beside) -> None:
    await beside.does("pause_generation", {})
    assert (await beside.http.get("health")).status_code == 200
    await beside.sglang.stop()
    for path in ("health", "ready", "get_weight_version", "model_info"):
        assert (await beside.http.get(path)).status_code == 503, path


async def _restarted(beside: Beside) -> None:
    """Behind the address that the gateway knows."""
    sidecar = beside.sidecar
    address = sidecar.admin_address
    await sidecar.stop()
    kit = replace(sidecar.settings.kit, admin_address=address)
    sidecar.settings = replace(sidecar.settings, kit=kit)
    await sidecar.start()

    async def there() -> bool:
        return (await beside.http.get("health")).status_code == 200

    await until(there, 30)


async def test_a_sidecar_is_started_anew_between_release_and_restore(beside: Beside) -> None:
    """It does not know then whose the pause is that it finds, and the ledger does."""
    for _ in range(2):
        await beside.does("release_memory_occupation", {"tags": ["kv_cache"]})
        await _restarted(beside)
        await beside.does("resume_memory_occupation", {})
        assert (await beside.http.get("ready")).status_code == 200
    await beside.does("pause_generation", {"mode": "retract"})
    await _restarted(beside)
    await beside.does("continue_generation", {})
    assert (await beside.http.get("ready")).status_code == 200
    assert not beside.sglang.model.dead
