"""What is known of the engine, in the places where SGLang's clients look for it. It is put together
out of what the engine tells this gateway: an engine's own settings, and the keys among them, are
never asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.backends.port import Discovery
from app.domain.operation import JsonObject, JsonValue
from app.http.compat import works
from app.http.compat.asked import Asked
from app.http.compat.checkpoints import UNNAMED
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import Invalid
from app.http.compat.sglang.works import role_word


def rank_asked(asked: Asked) -> int | None:
    """`include` only adds there to what this gateway does not know. Raises Invalid."""
    if asked.word("format", ("json", "prometheus"), "json") != "json":
        said = "figures are at the gateway's own /metrics"
        raise Invalid("query.format", "enum", said)
    if asked.text("dp_rank") is None:
        return None
    return asked.number("dp_rank", default=0, least=0, most=1 << 16)


async def model_info(call: CompatCall, _: None) -> Mapping[str, Any]:
    found = await call.discovered()
    return _model(found)


async def server_info(call: CompatCall, _: None) -> Mapping[str, Any]:
    """Flat, with one of `internal_states` for each data-parallel rank."""
    found = await call.discovered()
    shape = _part(found.info, "parallelism")
    room = _part(found.info, "capacity")
    replicas = _size(shape, "data_parallel_size")
    blocks, block = room.get("total_kv_blocks"), room.get("kv_block_size")
    tokens = blocks * block if isinstance(blocks, int) and isinstance(block, int) else None
    state = {"weight_version": found.facts.weights.version or UNNAMED}
    return {
        **_model(found),
        "tp_size": _size(shape, "tensor_parallel_size", _ranks(call, replicas)),
        "pp_size": _size(shape, "pipeline_parallel_size"),
        "dp_size": replicas,
        "encoder_only": False,
        "disaggregation_bootstrap_port": None,
        "max_running_requests": room.get("max_running_requests"),
        "max_total_num_tokens": tokens,
        "page_size": block,
        "version": str(found.info.get("engine_version") or ""),
        "status": "ready" if found.facts.serving else "paused",
        "internal_states": [state for _ in range(replicas)],
    }


async def models(call: CompatCall, _: None) -> Mapping[str, Any]:
    found = await call.discovered()
    made = int(call.house.clock.now().timestamp())
    served = [
        _listed(
            _text(model, "served_model_name", "model_id"), made, model.get("max_context_length")
        )
        for model in found.models
    ]
    parent = served[0]["id"] if served else None
    adapters = [
        {**_listed(lora.name, made, None), "root": lora.path, "parent": parent}
        for lora in found.facts.loras
    ]
    return {"object": "list", "data": [*served, *adapters]}


async def loads(call: CompatCall, rank: int | None) -> Mapping[str, Any]:
    """A number that the engine does not give is absent."""
    with call.house.round_trips.one_more(call.engine.id):
        load = await call.house.fleet.load(call.engine.id)
    ranks = load.get("ranks")
    rows = [one for one in ranks if isinstance(one, dict)] if isinstance(ranks, list) else []
    told = [_load(one, index) for index, one in enumerate(rows or [load])]
    return {
        "timestamp": call.house.clock.now().isoformat(),
        "version": str(call.engine.observed.info.get("engine_version") or ""),
        "accelerator": None,
        "num_accelerators": await works.world_size(call, include_dp=True),
        "loads": [one for one in told if rank is None or one["dp_rank"] == rank],
    }


def _load(one: Mapping[str, Any], index: int) -> dict[str, JsonValue]:
    named = {
        "dp_rank": one.get("data_parallel_rank", index),
        "num_running_reqs": one.get("running_requests"),
        "num_waiting_reqs": one.get("queued_requests"),
    }
    used, total = one.get("used_kv_blocks"), one.get("total_kv_blocks")
    if isinstance(used, int) and isinstance(total, int) and total:
        named["token_usage"] = round(used / total, 4)
    return {name: value for name, value in named.items() if value is not None}


def _model(found: Discovery) -> dict[str, JsonValue]:
    first: JsonObject = found.models[0] if found.models else {}
    return {
        "model_path": _text(first, "model_id"),
        "served_model_name": _text(first, "served_model_name", "model_id"),
        "is_generation": True,
        "weight_version": found.facts.weights.version or UNNAMED,
        "reasoning_parser": first.get("reasoning_parser"),
        "tool_call_parser": first.get("tool_call_parser"),
        "disaggregation_mode": role_word(found.facts.role),
    }


def _listed(name: str, made: int, longest: JsonValue) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": made,
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": longest,
    }


def _part(info: JsonObject, name: str) -> Mapping[str, JsonValue]:
    found = info.get(name)
    return found if isinstance(found, dict) else {}


def _size(shape: Mapping[str, JsonValue], name: str, default: int = 1) -> int:
    value = shape.get(name)
    return value if isinstance(value, int) and value > 0 else default


def _ranks(call: CompatCall, replicas: int) -> int:
    return max(call.can.world_size // replicas, 1)


def _text(model: JsonObject, *names: str) -> str:
    return next((str(model[name]) for name in names if model.get(name)), "")
