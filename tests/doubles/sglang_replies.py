"""How an SGLang server words what it says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tests.doubles.sglang_model import Request, Sglang

OPEN_TO_ALL = ("/health", "/ready", "/metrics")
# As the server shows them to whoever asks what it is.
SECRETS = {"api_key": "canary-of-requests", "admin_api_key": "canary-of-orders"}
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or "
    "waiting requests, the operation will not be performed.)\n"
)
_ORDINARY = ("/generate", "/v1/", "/model_info", "/server_info", "/openapi.json",
             "/scale_elastic_ep", "/is_scaling_elastic_ep")  # fmt: skip


class Invalid(Exception):
    """What of it."""


def administrative(path: str) -> bool:
    return not path.startswith(_ORDINARY)


def invalid(field: str) -> Response:
    said = (
        f"1 validation error:\n  {{'type': 'missing', 'loc': ('body', '{field}')}}\n\n"
        '  File "/srv/sglang/http_server.py", line 1, in handler\n'
    )
    body = {"object": "error", "message": said, "type": "Bad Request", "param": None, "code": 400}
    return JSONResponse(body, 400)


async def json_body(request: HttpRequest) -> dict[str, Any]:
    """Raises Invalid: none, or something else."""
    try:
        found = json.loads(await request.body())
    except ValueError:
        raise Invalid("body") from None
    if not isinstance(found, dict):
        raise Invalid("body")
    return found


def text(said: str, status: int = 200) -> Response:
    """Without a content type, as its own routes answer."""
    response = Response(said, status)
    del response.headers["content-type"]
    return response


def model_info_of(model: Sglang) -> dict[str, Any]:
    return {
        "model_path": model.path, "served_model_name": model.served_name,
        "tokenizer_path": model.path, "is_generation": True, "weight_version": model.version,
        "load_format": "auto", "disaggregation_mode": model.role, "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip


def info_of(model: Sglang, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_path": model.path, "version": options["version"], "random_seed": model.seed,
        "port": 30000, "startup_time": {"load_weight": 0.5, "tokenizer_e2e": 9.25 + model.seed},
        "tp_size": 1, "pp_size": 1, "dp_size": model.dp, "enable_dp_attention": False,
        "page_size": 1, "max_total_num_tokens": 8192, "max_running_requests": 8,
        "max_prefill_tokens": 16384, "context_length": 2048, "device": options["device"],
        "enable_memory_saver": options["memory_saver"],
        "enable_weights_cpu_backup": options["backup"], "elastic_ep_backend": options["elastic"],
        "enable_pd_role_switch": options["switch"], "weight_cache_mode": "off",
        "speculative_algorithm": None if options["draft"] is None else "EAGLE",
        "speculative_draft_model_path": options["draft"], "enable_lora": options["lora"],
        "max_loaded_loras": options["max_loaded_loras"], "kv_events_config": None,
        "internal_states": [{"world_size": model.dp}] * model.dp,
    }  # fmt: skip


def models_of(model: Sglang) -> dict[str, Any]:
    base = model.served_name
    served = [(base, base, None, 2048), *((n, p, base, None) for n, p in model.loras.items())]
    return {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": root,
             "parent": parent, "max_model_len": longest}
            for name, root, parent, longest in served
        ],
    }  # fmt: skip


def loads_of(model: Sglang, now: str) -> dict[str, Any]:
    seen = model.snapshot
    rows = [
        {
            "timestamp": seen.at, "dp_rank": rank,
            "num_running_reqs": seen.running if rank == 0 else 0,
            "num_waiting_reqs": seen.waiting if rank == 0 else 0,
            "num_used_tokens": 64 if seen.running and rank == 0 else 0,
            "max_total_num_tokens": 8192,
        }
        for rank in range(model.dp)
    ]  # fmt: skip
    return {"timestamp": now, "version": "0.5.23", "accelerator": None, "num_accelerators": 1,
            "loads": rows}  # fmt: skip


def ranks_of(model: Sglang) -> list[dict[str, Any]]:
    return [
        {
            "checksums": dict(model.sums), "per_gpu_checksum": "0",
            "parallelism_info": [
                {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": rank,
                 "dp_size": model.dp, "pp_rank": 0, "pp_size": 1, "rank": rank, "size": model.dp}
            ],
        }
        for rank in range(model.dp)
    ]  # fmt: skip


def _meta(model: Sglang, own: Request, made: int, reason: Any) -> dict[str, Any]:
    return {
        "id": own.rid, "finish_reason": reason, "prompt_tokens": 2, "completion_tokens": made,
        "weight_version": model.version, "cached_tokens": 0,
    }  # fmt: skip


def _reason(own: Request) -> dict[str, Any]:
    if own.aborted:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return {"type": "length", "length": own.tokens}


async def events_of(model: Sglang, own: Request) -> AsyncIterator[str]:
    """Each with all that was generated so far."""
    ids: list[int] = []
    async for token in model.stream(own):
        ids.append(token)
        whole = len(ids) == own.tokens
        yield _event(model, own, ids, _reason(own) if whole else None)
    if own.aborted or not ids:
        yield _event(model, own, ids, _reason(own))
    yield "data: [DONE]\n\n"


def _event(model: Sglang, own: Request, ids: list[int], reason: Any) -> str:
    body = {
        "text": "".join(f"{one} " for one in ids), "output_ids": ids,
        "meta_info": _meta(model, own, len(ids), reason),
    }  # fmt: skip
    return f"data: {json.dumps(body)}\n\n"


async def generated(model: Sglang, own: Request) -> dict[str, Any]:
    ids = [token async for token in model.stream(own)]
    return {
        "text": "".join(f"{one} " for one in ids), "output_ids": ids,
        "meta_info": _meta(model, own, len(ids), _reason(own)),
    }  # fmt: skip
