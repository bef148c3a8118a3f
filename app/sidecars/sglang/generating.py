"""A GenerateRequest as a body of /generate, and its events back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.enginekit.runtime import RuntimeFault
from app.rpc.openengine.v1 import generation_pb2 as pb
from app.sidecars.completions import REASONS, sampling_of, stops_of
from app.sidecars.http import CallError, EngineHttp

PATH = "/generate"
_HALF = "\N{REPLACEMENT CHARACTER}"


class Generation:
    """Implements ``app.sidecars.streams.Exchange``. Events tell all that was generated so far, or
    with a setting of the server only what is new; the count of tokens tells which."""

    path = PATH

    def __init__(self, request: pb.GenerateRequest, given: str) -> None:
        self.headers: Mapping[str, str] = {}
        self.body: Mapping[str, Any] = body_of(request, given)
        self.engine_id = given
        self._ids = 0
        self._text = ""

    def tokens(self, event: Mapping[str, Any]) -> pb.TokenOutput | None:
        ids, text = event.get("output_ids"), event.get("text")
        if not isinstance(ids, list) or not isinstance(text, str):
            return None
        total = _meta(event).get("completion_tokens")
        whole = total == len(ids) or not isinstance(total, int)
        new = ids[self._ids :] if whole else ids
        self._ids += len(new)
        said = self._new_text(text, ended="finish_reason" in _ended(event)) if whole else text
        if not new and not said:
            return None
        tokens = [pb.TokenInfo(token_id=one) for one in new]
        return pb.TokenOutput(output_index=0, tokens=tokens, text=said)

    def _new_text(self, text: str, *, ended: bool) -> str:
        """Half a character is told when it is a whole one, or the last."""
        told = text if ended else text.rstrip(_HALF)
        new = told[len(self._text) :]
        self._text += new
        return new

    def finished(self, event: Mapping[str, Any]) -> pb.GenerationFinished | None:
        reason = _meta(event).get("finish_reason")
        if not isinstance(reason, dict):
            return None
        end = pb.GenerationFinished(
            output_index=0,
            reason=REASONS.get(str(reason.get("type")), pb.FINISH_REASON_CANCELLED),
        )
        matched = reason.get("matched")
        if isinstance(matched, str):
            end.stop_match.stop_text = matched
        elif isinstance(matched, int):
            end.stop_match.stop_token_id = matched
        return end

    def usage(self, event: Mapping[str, Any]) -> pb.Usage | None:
        meta = _meta(event)
        prompt, made = meta.get("prompt_tokens"), meta.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(made, int):
            return None
        return pb.Usage(prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made)


def _meta(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("meta_info")
    return found if isinstance(found, dict) else {}


def _ended(event: Mapping[str, Any]) -> Mapping[str, Any]:
    return {k: v for k, v in _meta(event).items() if k == "finish_reason" and v is not None}


def body_of(request: pb.GenerateRequest, given: str) -> dict[str, Any]:
    sampling, stopping = request.sampling, request.stopping
    chosen = sampling_of(sampling)
    if chosen.get("top_k") == 0:  # all of them, which SGLang writes as -1
        chosen["top_k"] = -1
    if sampling.HasField("seed"):
        chosen["sampling_seed"] = sampling.seed
    chosen["max_new_tokens"] = stopping.max_tokens if stopping.HasField("max_tokens") else 16
    if stopping.HasField("min_tokens"):
        chosen["min_new_tokens"] = stopping.min_tokens
    if stopping.HasField("ignore_eos"):
        chosen["ignore_eos"] = stopping.ignore_eos
    if stopping.HasField("include_stop_in_output"):
        chosen["no_stop_trim"] = stopping.include_stop_in_output
    chosen |= stops_of(stopping)
    body: dict[str, Any] = {"rid": given, "stream": True, "sampling_params": chosen}
    if request.HasField("prompt"):
        body["text"] = request.prompt
    else:
        body["input_ids"] = list(request.token_ids.ids)
    if request.lora_name:
        body["lora_path"] = request.lora_name
    return body


async def probe(http: EngineHttp, within_s: float) -> None:
    """One token. Raises RuntimeFault."""
    body = {"text": "probe", "sampling_params": {"max_new_tokens": 1}}
    try:
        await http.post(PATH, body=body, within_s=within_s)
    except CallError as error:
        raise RuntimeFault("CANNOT_SERVE", error.message) from error
