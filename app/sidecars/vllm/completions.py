"""A GenerateRequest as a body of /v1/completions, and its events back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.enginekit.runtime import RuntimeFault
from app.rpc.openengine.v1 import generation_pb2 as pb
from app.sidecars.http import CallError, EngineHttp

PATH = "/v1/completions"

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_CANCELLED,
}


class Completion:
    """Implements ``app.sidecars.streams.Exchange``."""

    path = PATH

    def __init__(self, request: pb.GenerateRequest, given: str) -> None:
        self.headers: Mapping[str, str] = {"X-Request-Id": given}
        self.body: Mapping[str, Any] = body_of(request)
        self.engine_id = f"cmpl-{given}-0"

    def tokens(self, event: Mapping[str, Any]) -> pb.TokenOutput | None:
        return tokens_of(event)

    def finished(self, event: Mapping[str, Any]) -> pb.GenerationFinished | None:
        return finished(event)

    def usage(self, event: Mapping[str, Any]) -> pb.Usage | None:
        return usage_of(event)


async def probe(http: EngineHttp, model: str, within_s: float) -> None:
    """One token. Raises RuntimeFault."""
    body = {"model": model, "prompt": "probe", "max_tokens": 1}
    try:
        await http.post(PATH, body=body, within_s=within_s)
    except CallError as error:
        raise RuntimeFault("CANNOT_SERVE", error.message) from error


def body_of(request: pb.GenerateRequest) -> dict[str, Any]:
    sampling, stopping = request.sampling, request.stopping
    body: dict[str, Any] = {
        "model": request.lora_name or request.model,
        "prompt": request.prompt if request.HasField("prompt") else list(request.token_ids.ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    for field, value in sampling.ListFields():
        if field.name in _SAMPLING:
            body[field.name] = value
    if body.get("top_k") == 0:  # all of them, which vLLM writes as -1
        body["top_k"] = -1
    body["max_tokens"] = stopping.max_tokens if stopping.HasField("max_tokens") else 16
    if stopping.HasField("min_tokens"):
        body["min_tokens"] = stopping.min_tokens
    if stopping.HasField("ignore_eos"):
        body["ignore_eos"] = stopping.ignore_eos
    if stopping.HasField("include_stop_in_output"):
        body["include_stop_str_in_output"] = stopping.include_stop_in_output
    texts = [one.stop_text for one in stopping.conditions if one.HasField("stop_text")]
    ids = [one.stop_token_id for one in stopping.conditions if one.HasField("stop_token_id")]
    if texts:
        body["stop"] = texts
    if ids:
        body["stop_token_ids"] = ids
    if request.kv.cache_salt:
        body["cache_salt"] = request.kv.cache_salt
    return body


def _choice(event: Mapping[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def tokens_of(event: Mapping[str, Any]) -> pb.TokenOutput | None:
    """None: the event brings none."""
    choice = _choice(event)
    ids, text = choice.get("token_ids") or (), choice.get("text") or ""
    if not ids and not text:
        return None
    tokens = [pb.TokenInfo(token_id=one) for one in ids]
    return pb.TokenOutput(output_index=0, tokens=tokens, text=text)


def finished(event: Mapping[str, Any]) -> pb.GenerationFinished | None:
    choice = _choice(event)
    reason = choice.get("finish_reason")
    if not isinstance(reason, str):
        return None
    end = pb.GenerationFinished(
        output_index=0, reason=_REASONS.get(reason, pb.FINISH_REASON_CANCELLED)
    )
    matched = choice.get("stop_reason")
    if isinstance(matched, str):
        end.stop_match.stop_text = matched
    elif isinstance(matched, int):
        end.stop_match.stop_token_id = matched
    return end


def usage_of(event: Mapping[str, Any]) -> pb.Usage | None:
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    return pb.Usage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        total_tokens=usage.get("total_tokens") or 0,
    )
