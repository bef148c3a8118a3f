"""What servers of /v1/completions have in common: what is asked of them, and their events. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.rpc.openengine.v1 import generation_pb2 as pb

PATH = "/v1/completions"

REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_CANCELLED,
}


class CompletionEvents:
    """The half of ``app.sidecars.streams.Exchange`` that reads."""

    path = PATH

    def tokens(self, event: Mapping[str, Any]) -> pb.TokenOutput | None:
        """None: the event brings none."""
        choice = _choice(event)
        ids, text = choice.get("token_ids") or (), choice.get("text") or ""
        if not ids and not text:
            return None
        tokens = [pb.TokenInfo(token_id=one) for one in ids]
        return pb.TokenOutput(output_index=0, tokens=tokens, text=text)

    def finished(self, event: Mapping[str, Any]) -> pb.GenerationFinished | None:
        choice = _choice(event)
        reason = choice.get("finish_reason")
        if not isinstance(reason, str):
            return None
        end = pb.GenerationFinished(
            output_index=0, reason=REASONS.get(reason, pb.FINISH_REASON_CANCELLED)
        )
        matched = choice.get("stop_reason")
        if isinstance(matched, str):
            end.stop_match.stop_text = matched
        elif isinstance(matched, int):
            end.stop_match.stop_token_id = matched
        return end

    def usage(self, event: Mapping[str, Any]) -> pb.Usage | None:
        usage = event.get("usage")
        if not isinstance(usage, dict):
            return None
        return pb.Usage(
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            total_tokens=usage.get("total_tokens") or 0,
        )


def body_of(request: pb.GenerateRequest) -> dict[str, Any]:
    """With the names that they share. An adapter is named as the model."""
    sampling, stopping = request.sampling, request.stopping
    body: dict[str, Any] = {
        "model": request.lora_name or request.model,
        "prompt": request.prompt if request.HasField("prompt") else list(request.token_ids.ids),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= sampling_of(sampling)
    if sampling.HasField("seed"):
        body["seed"] = sampling.seed
    body["max_tokens"] = stopping.max_tokens if stopping.HasField("max_tokens") else 16
    if stopping.HasField("min_tokens"):
        body["min_tokens"] = stopping.min_tokens
    if stopping.HasField("ignore_eos"):
        body["ignore_eos"] = stopping.ignore_eos
    if stopping.HasField("include_stop_in_output"):
        body["include_stop_str_in_output"] = stopping.include_stop_in_output
    body |= stops_of(stopping)
    if request.kv.cache_salt:
        body["cache_salt"] = request.kv.cache_salt
    return body


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def sampling_of(sampling: pb.SamplingParams) -> dict[str, Any]:
    """What is said, by the names that most servers share; of the seed they have several."""
    return {field.name: value for field, value in sampling.ListFields() if field.name in _SAMPLING}


def stops_of(stopping: pb.StoppingOptions) -> dict[str, Any]:
    texts = [one.stop_text for one in stopping.conditions if one.HasField("stop_text")]
    ids = [one.stop_token_id for one in stopping.conditions if one.HasField("stop_token_id")]
    return {**({"stop": texts} if texts else {}), **({"stop_token_ids": ids} if ids else {})}


def _choice(event: Mapping[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}
