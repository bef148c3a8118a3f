"""What a vLLM server is and offers, found out once, without changing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.sidecars.answers import Unreadable, field_of, number_in, served_models, text_in
from app.sidecars.http import EngineHttp, WrongAnswer
from app.sidecars.vllm.answers import metrics_of

# Each answers POST alone where it is there: a GET is 405 then, else 404, and does nothing.
_ORDERS = (
    "/abort_requests",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/pause",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weights",
    "/v1/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weight_checker",
)
_READS = ("/get_world_size", "/is_paused", "/is_sleeping", "/kv_event_sources", "/weight_info")
# The first answer collects what the machine looks like, which takes seconds.
_SERVER_INFO_S = 60.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one life of the engine. `started_at`: of the server's process, in Unix seconds;
    `instance`: drawn anew by each start. None: not told."""

    started_at: float | None
    instance: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """Sizes in ranks, requests, tokens and blocks; None: not told. `paths`: routes that are there.
    `sleeps`: it was started so that sleeping gives memory back. `profile_dir` None: it records no
    traces. `transfer`: the weight-transfer backend, None without one."""

    version: str
    identity: Identity
    models: tuple[str, ...]
    root: str
    max_model_len: int | None
    paths: frozenset[str]
    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    block_size: int | None = None
    total_blocks: int | None = None
    max_running: int | None = None
    max_batched_tokens: int | None = None
    device: str = ""
    sleeps: bool = False
    elastic: bool = False
    draft: bool = False
    lora_slots: int | None = None
    profile_dir: str | None = None
    profile_shapes: bool = False
    profile_stacks: bool = False
    transfer: str | None = None

    def has(self, *paths: str) -> bool:
        return self.paths >= set(paths)


async def discover(http: EngineHttp) -> Discovered:
    """Raises NotSent, NoAnswer, Refused (a key that is not taken among others), WrongAnswer."""
    try:
        return await _discover(http)
    except Unreadable as error:
        raise WrongAnswer(f"no vLLM server answers there: {error}") from error


async def _discover(http: EngineHttp) -> Discovered:
    version = field_of(await http.read("/version"), "version", str)
    models = served_models(await http.read("/v1/models"))
    bases = [model for model in models if model.parent is None]
    if not bases:
        raise Unreadable("it serves no model")
    metrics = metrics_of(await http.read("/metrics"))
    paths = await _paths(http)
    config = await _config(http)
    parallel, cache = _part(config, "parallel_config"), _part(config, "cache_config")
    scheduling = _part(config, "scheduler_config")
    profiler, lora = _part(config, "profiler_config"), _part(config, "lora_config")
    recording = profiler.get("profiler") == "torch"
    sizes = [
        number_in(parallel, f"{name}_parallel_size") or 1 for name in ("tensor", "pipeline", "data")
    ]
    return Discovered(
        version=version,
        identity=Identity(metrics.started_at, text_in(config, "instance_id")),
        models=tuple(model.name for model in bases),
        root=bases[0].root,
        max_model_len=bases[0].max_model_len,
        paths=paths,
        world_size=await _world_size(http, paths) or sizes[0] * sizes[1] * sizes[2],
        tensor_parallel_size=sizes[0],
        pipeline_parallel_size=sizes[1],
        data_parallel_size=sizes[2],
        block_size=number_in(cache, "block_size"),
        total_blocks=number_in(cache, "num_gpu_blocks"),
        max_running=number_in(scheduling, "max_num_seqs"),
        max_batched_tokens=number_in(scheduling, "max_num_batched_tokens"),
        device=text_in(_part(config, "device_config"), "device") or "",
        sleeps=_part(config, "model_config").get("enable_sleep_mode") is True,
        elastic=parallel.get("enable_elastic_ep") is True,
        draft=bool(_part(config, "speculative_config")),
        lora_slots=number_in(lora, "max_cpu_loras") or number_in(lora, "max_loras"),
        profile_dir=(text_in(profiler, "torch_profiler_dir") or None) if recording else None,
        profile_shapes=profiler.get("torch_profiler_record_shapes") is True,
        profile_stacks=profiler.get("torch_profiler_with_stack") is True,
        transfer=text_in(_part(config, "weight_transfer_config"), "backend"),
    )


async def _paths(http: EngineHttp) -> frozenset[str]:
    statuses = await asyncio.gather(*(http.get(path) for path in _ORDERS))
    there = {path for path, one in zip(_ORDERS, statuses, strict=True) if one.status == 405}
    statuses = await asyncio.gather(*(http.get(path) for path in _READS))
    return frozenset(
        there | {path for path, one in zip(_READS, statuses, strict=True) if one.status == 200}
    )


async def _world_size(http: EngineHttp, paths: frozenset[str]) -> int | None:
    if "/get_world_size" not in paths:
        return None
    answer = await http.read("/get_world_size", [("include_dp", "true")])
    return int(field_of(answer, "world_size", int))


async def _config(http: EngineHttp) -> Mapping[str, Any]:
    """Empty where the server does not tell it: that takes its development mode."""
    query = [("config_format", "json")]
    answer = await http.get("/server_info", query, within_s=_SERVER_INFO_S)
    if answer.status != 200:
        return {}
    config = field_of(answer, "vllm_config", dict)
    assert isinstance(config, dict)
    return config


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}
