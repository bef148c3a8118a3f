"""Clients of SGLang's administrative endpoints, as they are: the order and the shapes of their
calls, what they check of an answer and what they don't. `Wire` is that of vLLM's clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.doubles.trainers import Step, Wire

GROUP = {
    "master_address": "127.0.0.1",
    "master_port": 29500,
    "rank_offset": 1,
    "world_size": 3,
    "group_name": "slime-pp_0",
    "backend": "gloo",
}
AREAL_GROUP = {**GROUP, "group_name": "update_weight_group_0"}
_FLUSHES = 60


async def _does(wire: Wire, path: str, body: Mapping[str, Any]) -> Any:
    """Of every answer the body is read as JSON, `null` too."""
    return (await wire.checked(path, body)).json()


async def _flushed(wire: Wire) -> int:
    """Asked until it is 200; how often. In life with a second in between."""
    for tries in range(1, _FLUSHES + 1):
        if (await wire.get("flush_cache")).status_code == 200:
            return tries
    raise TimeoutError("the cache could not be flushed")


# ---- slime ----


async def slime_start(wire: Wire) -> int:
    """What it asks of a server that it finds; its number of devices."""
    (await wire.get("health_generate")).raise_for_status()
    info = (await wire.get("server_info")).raise_for_status().json()
    assert info["disaggregation_mode"] in ("null", "prefill", "decode")
    assert info["encoder_only"] is False
    return int(info["tp_size"]) * int(info["pp_size"])


async def slime(wire: Wire, steps: Sequence[Step], group: Mapping[str, Any] = GROUP) -> list[str]:
    """Weights by a group, in buckets, without a word of where an update begins or ends. The version
    that it reads after each."""
    await wire.post("destroy_weights_update_group", {"group_name": group["group_name"]})
    await _does(wire, "init_weights_update_group", group)
    told = []
    for step in steps:
        await _does(wire, "pause_generation", {})
        await _flushed(wire)
        for piece in step.pieces:
            bucket = {
                **piece,
                "group_name": group["group_name"],
                "flush_cache": False,
                "weight_version": step.version,
            }
            await _does(wire, "update_weights_from_distributed", bucket)
        await _does(wire, "continue_generation", {})
        answer = (await wire.get("get_weight_version")).raise_for_status()
        told.append(str(answer.json()["weight_version"]))
    return told


async def slime_on_the_same_devices(wire: Wire, step: Step) -> None:
    """Memory given up while it trains, weights taken back first and filled, then the rest."""
    await _flushed(wire)
    await _does(wire, "release_memory_occupation", {})
    await _does(wire, "resume_memory_occupation", {"tags": ["weights"]})
    await _does(wire, "pause_generation", {})
    await _flushed(wire)
    for piece in step.pieces:
        body = {**piece, "flush_cache": False, "weight_version": step.version}
        await _does(wire, "update_weights_from_disk", body)
    await _does(wire, "resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    await _does(wire, "continue_generation", {})


# ---- AReaL ----


async def areal(wire: Wire, steps: Sequence[Step]) -> None:
    """Weights by files, whose paths alone tell one step from the next."""
    for step in steps:
        await wire.checked("pause_generation", {})
        for piece in step.pieces:
            await wire.checked("update_weights_from_disk", {**piece, "abort_all_requests": True})
        await wire.checked("continue_generation", {})


async def areal_by_group(
    wire: Wire, steps: Sequence[Step], group: Mapping[str, Any] = AREAL_GROUP
) -> None:
    """A port that is a text, and fields that only another engine knows."""
    named = {**group, "master_port": str(group["master_port"]), "pp_rank": 0}
    await wire.checked("init_weights_update_group", named)
    for step in steps:
        await wire.checked("pause_generation", {})
        for piece in step.pieces:
            body = {**piece, "group_name": named["group_name"], "abort_all_requests": True}
            await wire.checked("update_weights_from_distributed", {**body, "pp_rank": 0})
        await wire.checked("continue_generation", {})


# ---- verl ----


async def verl(wire: Wire, step: Step) -> list[int]:
    """Sends again what it had no answer to in time. The statuses of what it sends pickled."""
    await wire.checked("release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await wire.checked("resume_memory_occupation", {"tags": ["weights"]})
    pickled = {"serialized_named_tensors": ["gASV"], "load_format": None, "flush_cache": False}
    refused = [(await wire.post("update_weights_from_tensor", pickled)).status_code]
    adapter = {"lora_name": "verl", "config_dict": {}, "serialized_named_tensors": "gASV"}
    refused.append((await wire.post("load_lora_adapter_from_tensors", adapter)).status_code)
    for piece in step.pieces:
        await wire.checked("update_weights_from_disk", {**piece, "weight_version": step.version})
    await wire.checked("resume_memory_occupation", {"tags": ["kv_cache"]})
    await _flushed(wire)
    await wire.checked("abort_request", {"rid": "", "abort_all": True})
    (await wire.get("v1/models")).raise_for_status()
    return refused


# ---- NeMo-RL ----


async def nemo_rl(wire: Wire) -> None:
    """Memory alone: all three tags, whatever the engine has."""
    await _flushed(wire)
    tags = ["weights", "kv_cache", "cuda_graph"]
    await wire.checked("release_memory_occupation", {"tags": tags})
    for tag in tags:
        await wire.checked("resume_memory_occupation", {"tags": [tag]})


# ---- tensors that the trainer has pickled ----


async def verl_by_tensors(wire: Wire, version: str, buckets: Sequence[list[str]]) -> None:
    """On the same devices: all memory given up while it trains, weights taken back and filled by
    buckets, each sent again where no answer came in time, then the rest."""
    await wire.checked("release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await wire.checked("resume_memory_occupation", {"tags": ["weights"]})
    for bucket in buckets:
        body = {
            "serialized_named_tensors": bucket,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": version,
        }
        await wire.checked("update_weights_from_tensor", body)
    await wire.checked("resume_memory_occupation", {"tags": ["kv_cache"]})
    await _flushed(wire)


async def slime_by_tensors(wire: Wire, version: str, buckets: Sequence[list[str]]) -> str:
    """Under a pause of its own. The version that it reads afterwards."""
    await _does(wire, "pause_generation", {})
    await _flushed(wire)
    for bucket in buckets:
        body = {
            "serialized_named_tensors": bucket,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": version,
        }
        await _does(wire, "update_weights_from_tensor", body)
    await _does(wire, "continue_generation", {})
    answer = (await wire.get("get_weight_version")).raise_for_status()
    return str(answer.json()["weight_version"])


async def by_tensors_in_bounds(wire: Wire, version: str, buckets: Sequence[list[str]]) -> None:
    """As clients of 0.5.23 do: an update says where it begins and ends."""
    await _does(wire, "begin_weight_update", {"selector": "all"})
    for bucket in buckets:
        body = {"serialized_named_tensors": bucket, "weight_version": version}
        await _does(wire, "update_weights_from_tensor", body)
    await _does(wire, "end_weight_update", {})
