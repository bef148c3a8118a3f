"""A wire request checked against the model's limits, before the engine takes it on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.reference_engine.errors import InvalidRequest, UnsupportedRequest
from app.reference_engine.messages import GenerationRequest, Logprobs, Sampling, Stopping
from app.reference_engine.tokenizer import Tokenizer
from app.rpc.openengine.v1 import generation_pb2 as pb

MAX_TOP_LOGPROBS = 20
_MAX_STOP_CONDITIONS = 64
_MAX_STOP_TEXT = 1024

_Number = Literal[
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Turns requests into the engine's own form. ``draw_seed`` gives a 64-bit number for requests
    that bring no seed. ``max_model_len`` is prompt and output together, in tokens."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    draw_seed: Callable[[], int]

    def read(self, request: pb.GenerateRequest) -> GenerationRequest:
        """Raises InvalidRequest or UnsupportedRequest, naming the field."""
        prompt_ids = self._prompt(request)
        return GenerationRequest(
            request_id=request.request_id,
            prompt_ids=prompt_ids,
            sampling=self._sampling(request.sampling),
            stopping=self._stopping(request.stopping, self.max_model_len - len(prompt_ids)),
            logprobs=self._logprobs(request.response),
            bypass_prefix_cache=request.kv.bypass_prefix_cache,
            cache_salt=request.kv.cache_salt,
            adapter=request.lora_name,
        )

    def _prompt(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        longest = self.max_model_len - 1
        if request.WhichOneof("input") == "token_ids":
            prompt_ids = tuple(request.token_ids.ids)
            self._check_ids("token_ids", prompt_ids)
        else:
            # Encoding blocks the event loop, so a text that can not possibly fit is not encoded.
            if len(request.prompt) > self.tokenizer.longest_text(longest):
                raise InvalidRequest("prompt", f"more than {longest} tokens")
            prompt_ids = self.tokenizer.encode(request.prompt)
        if not prompt_ids:
            raise InvalidRequest("prompt", "no token")
        if len(prompt_ids) > longest:
            raise InvalidRequest("prompt", f"{len(prompt_ids)} tokens, the most are {longest}")
        return prompt_ids

    def _sampling(self, given: pb.SamplingParams) -> Sampling:
        if given.HasField("num_sequences") and given.num_sequences != 1:
            if given.num_sequences == 0:
                raise InvalidRequest("sampling.num_sequences", "must be above 0")
            raise UnsupportedRequest("sampling.num_sequences", "one output for each request")
        top_k = given.top_k if given.HasField("top_k") else 0
        if top_k < -1:
            raise InvalidRequest("sampling.top_k", "a count, or -1 or 0 for no limit")
        return Sampling(
            temperature=_number(given, "temperature", 1.0, at_least=0.0),
            top_k=max(top_k, 0),
            top_p=_number(given, "top_p", 1.0, above=0.0, at_most=1.0),
            min_p=_number(given, "min_p", 0.0, at_least=0.0, at_most=1.0),
            frequency_penalty=_number(given, "frequency_penalty", 0.0, at_least=-2.0, at_most=2.0),
            presence_penalty=_number(given, "presence_penalty", 0.0, at_least=-2.0, at_most=2.0),
            repetition_penalty=_number(given, "repetition_penalty", 1.0, above=0.0),
            seed=given.seed if given.HasField("seed") else self.draw_seed(),
        )

    def _stopping(self, given: pb.StoppingOptions, room: int) -> Stopping:
        """``room`` is how many tokens fit behind the prompt; a longer wish ends there."""
        if given.HasField("max_tokens") and given.max_tokens == 0:
            raise InvalidRequest("stopping.max_tokens", "must be above 0")
        max_tokens = min(given.max_tokens, room) if given.HasField("max_tokens") else room
        if given.min_tokens > max_tokens:
            raise InvalidRequest("stopping.min_tokens", f"the output has room for {max_tokens}")
        if len(given.conditions) > _MAX_STOP_CONDITIONS:
            raise InvalidRequest("stopping.conditions", f"the most are {_MAX_STOP_CONDITIONS}")
        texts: list[str] = []
        token_ids: list[int] = []
        for condition in given.conditions:
            match condition.WhichOneof("condition"):
                case "stop_text":
                    if not 0 < len(condition.stop_text) <= _MAX_STOP_TEXT:
                        cause = f"a text of 1 to {_MAX_STOP_TEXT} characters"
                        raise InvalidRequest("stopping.conditions.stop_text", cause)
                    texts.append(condition.stop_text)
                case "stop_token_id":
                    token_ids.append(condition.stop_token_id)
                case _:
                    raise InvalidRequest("stopping.conditions", "an empty condition")
        self._check_ids("stopping.conditions.stop_token_id", token_ids)
        return Stopping(
            max_tokens=max_tokens,
            min_tokens=given.min_tokens,
            stop_token_ids=tuple(token_ids),
            stop_texts=tuple(texts),
            ignore_eos=given.ignore_eos,
            include_stop_in_output=given.include_stop_in_output,
        )

    def _logprobs(self, given: pb.ResponseOptions) -> Logprobs | None:
        if not given.return_output_logprobs and not given.HasField("output_candidates"):
            return None
        selection = given.output_candidates
        match selection.WhichOneof("selection"):
            case "top_n":
                if selection.top_n > MAX_TOP_LOGPROBS:
                    cause = f"the most are {MAX_TOP_LOGPROBS}"
                    raise InvalidRequest("response.output_candidates.top_n", cause)
                return Logprobs(top_n=selection.top_n)
            case "token_ids":
                self._check_ids("response.output_candidates.token_ids", selection.token_ids.ids)
                return Logprobs(token_ids=tuple(selection.token_ids.ids))
            case "all":
                cause = f"top_n up to {MAX_TOP_LOGPROBS}, or token_ids"
                raise UnsupportedRequest("response.output_candidates.all", cause)
            case _:
                return Logprobs()

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        if any(token_id >= self.vocab_size for token_id in token_ids):
            raise InvalidRequest(field, f"token ids are below {self.vocab_size}")


def _number(
    given: pb.SamplingParams,
    name: _Number,
    default: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> float:
    if not given.HasField(name):
        return default
    value = float(getattr(given, name))
    if not math.isfinite(value):
        raise InvalidRequest(f"sampling.{name}", "must be a finite number")
    if above is not None and value <= above:
        raise InvalidRequest(f"sampling.{name}", f"must be above {above:g}")
    if at_least is not None and value < at_least:
        raise InvalidRequest(f"sampling.{name}", f"must be at least {at_least:g}")
    if at_most is not None and value > at_most:
        raise InvalidRequest(f"sampling.{name}", f"must be at most {at_most:g}")
    return value
