"""Bodies of a vLLM server, and how it judges what it is sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.doubles.vllm_model import Dead, Failure, OutOfOrder, Request, Vllm

PAUSED = {
    "error": {
        "message": "Generation is paused. Please retry after it resumes.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}


class Invalid(Exception):
    """What was sent is not what the route takes."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def error(status: int, kind: str, message: str, param: str | None) -> Response:
    told = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": told}, status)


def failed(failure: Failure) -> Response:
    message = str(failure)
    if not isinstance(failure, Dead | OutOfOrder):
        message = (
            f"Call to collective_rpc method failed: Worker failed with error '{message}', please "
            "check the stack trace above for the root cause"
        )
    return error(500, "InternalServerError", message, None)


def json_body(sent: bytes, *, whatever: str | None = None) -> dict[str, Any]:
    try:
        body = json.loads(sent)
    except ValueError:
        raise Invalid(whatever or "JSON decode error", None) from None
    if not isinstance(body, dict):
        raise Invalid("Request body must be a JSON object", None)
    return body


def one_of(request: HttpRequest, name: str, known: Sequence[str], default: str) -> str:
    value = request.query_params.get(name, default)
    if value not in known:
        raise Invalid("1 validation error", f"query.{name}")
    return value


def flag(request: HttpRequest, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value not in ("true", "false", "1", "0"):
        raise Invalid("1 validation error", f"query.{name}")
    return value in ("true", "1")


def number(request: HttpRequest, name: str, default: int, least: int, most: int) -> int:
    value = request.query_params.get(name, str(default))
    try:
        found = int(value)
    except ValueError:
        raise Invalid("1 validation error", f"query.{name}") from None
    if not least <= found <= most:
        raise Invalid("1 validation error", f"query.{name}")
    return found


async def completion(model: Vllm, own: Request, given: str, *, streamed: bool) -> Response:
    if model.dead:
        return failed(Dead())
    if model.turns_away and model.pause_state != "open":
        if not streamed:
            return JSONResponse(PAUSED, 503)
        return StreamingResponse(_once(PAUSED), media_type="text/event-stream")
    if streamed:
        return StreamingResponse(_stream(model, own, given), media_type="text/event-stream")
    text, made = "", 0
    async for token in model.stream(own):
        text, made = f"{text} t{token}", made + 1
    if own.error is not None or model.dead:
        return failed(Dead())
    reason = "abort" if own.aborted else "length"
    usage = _usage(made)
    choice = {"index": 0, "text": text, "finish_reason": reason, "stop_reason": None}
    return JSONResponse({"id": given, "choices": [choice], "usage": usage})


async def _once(body: Any) -> AsyncIterator[str]:
    yield f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"


async def _stream(model: Vllm, own: Request, given: str) -> AsyncIterator[str]:
    made = 0
    async for token in model.stream(own):
        made += 1
        last = "length" if made == own.tokens else None
        yield _event(given, f" t{token}", [token], last)
    if own.error is not None or model.dead:
        message = {
            "message": str(Dead()), "type": "InternalServerError", "param": None, "code": 500,
        }  # fmt: skip
        yield f"data: {json.dumps({'error': message})}\n\ndata: [DONE]\n\n"
        return
    # Ended before its first token, a stream says nothing about its end.
    if own.aborted and made:
        yield _event(given, "", [], "abort")
    yield f"data: {json.dumps({'id': given, 'choices': [], 'usage': _usage(made)})}\n\n"
    yield "data: [DONE]\n\n"


def _event(given: str, text: str, ids: list[int], reason: str | None) -> str:
    choice = {
        "index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None,
        "prompt_token_ids": None, "token_ids": ids,
    }  # fmt: skip
    body = {"id": given, "object": "text_completion", "created": 0, "model": "tiny",
            "choices": [choice]}  # fmt: skip
    return f"data: {json.dumps(body)}\n\n"


def _usage(made: int) -> dict[str, int]:
    return {"prompt_tokens": 2, "total_tokens": made + 2, "completion_tokens": made}


def models_of(model: Vllm, checkpoint: Path) -> dict[str, Any]:
    served = [("tiny", str(checkpoint), None), *((n, p, "tiny") for n, p in model.loras.items())]
    return {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "owned_by": "vllm", "root": root, "parent": parent,
             "max_model_len": 2048 if parent is None else None}
            for name, root, parent in served
        ],
    }  # fmt: skip


def metrics_text(model: Vllm) -> str:
    running = len(model.counted)
    in_use = sorted({one.adapter or "" for one in model.counted} - {""})
    names = [name for name, path in model.loras.items() if path in in_use]
    engines = range(model.data_parallel_size)
    lines = ["# TYPE process_start_time_seconds gauge",
             f"process_start_time_seconds {model.started_at!r}"]  # fmt: skip
    for engine in engines:
        labels = f'engine="{engine}",model_name="tiny"'
        here = running if engine == 0 else 0
        lines += [
            f"vllm:num_requests_running{{{labels}}} {float(here)}",
            f"vllm:num_requests_waiting{{{labels}}} 0.0",
            f"vllm:kv_cache_usage_perc{{{labels}}} {0.1 if here else 0.0}",
        ]
        for state in ("awake", "weights_offloaded", "discard_all"):
            shown = 1.0 if model.shown_sleep == state else 0.0
            lines.append(f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {shown}')
    lines.append(
        'vllm:lora_requests_info{max_lora="4",'
        f'running_lora_adapters="{",".join(names)}",waiting_lora_adapters=""}} 1.0'
    )
    return "\n".join(lines) + "\n"


def config_of(model: Vllm, checkpoint: Path, options: dict[str, Any]) -> dict[str, Any]:
    """As far as anybody looks at it."""
    profile_dir = options["profile_dir"]
    return {
        "instance_id": options["instance"],
        "model_config": {
            "model": str(checkpoint), "served_model_name": "tiny", "max_model_len": 2048,
            "enable_sleep_mode": options["sleep_mode"],
        },
        "parallel_config": {
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
            "data_parallel_size": model.data_parallel_size,
            "enable_elastic_ep": options["elastic"],
        },
        "scheduler_config": {"max_num_seqs": 8, "max_num_batched_tokens": 2048},
        "cache_config": {"block_size": 16, "num_gpu_blocks": 1024},
        "device_config": {"device": options["device"]},
        "lora_config": {"max_loras": options["max_loras"], "max_cpu_loras": options["max_loras"]}
        if options["adapters"]
        else None,
        "speculative_config": {"method": "eagle"} if options["draft"] else None,
        "profiler_config": {
            "profiler": None if profile_dir is None else "torch",
            "torch_profiler_dir": "" if profile_dir is None else str(profile_dir),
            "torch_profiler_record_shapes": False, "torch_profiler_with_stack": True,
        },
        "weight_transfer_config": None if model.backend == "none" else {"backend": model.backend},
    }  # fmt: skip
