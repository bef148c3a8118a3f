"""Whether a generation request can be served at all; judged before it is taken on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from app.domain.errors import FieldFault, InvalidArgument
from app.enginekit.refusals import UnknownModel, UnsupportedFeature
from app.enginekit.runtime import EngineDescription, Feature
from app.rpc.openengine.v1 import generation_pb2

MAX_REQUEST_ID_CHARS = 256


def ready_request(
    request: generation_pb2.GenerateRequest,
    engine: EngineDescription,
    new_id: Callable[[], str],
) -> generation_pb2.GenerateRequest:
    """A copy with `request_id` and `model` filled in.

    Raises InvalidArgument, UnknownModel, or UnsupportedFeature naming every part that the engine
    would otherwise have to leave out silently.
    """
    ready = generation_pb2.GenerateRequest()
    ready.CopyFrom(request)
    ready.request_id = request.request_id or new_id()
    ready.model = request.model or engine.models[0]
    if len(ready.request_id) > MAX_REQUEST_ID_CHARS:
        raise _fault("/request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters")
    if ready.model not in engine.models:
        raise UnknownModel("this engine does not serve that model")
    _check_input(ready)
    faults = tuple(_faults(ready))
    if faults:
        raise InvalidArgument(f"{_name(faults[0])} {faults[0].detail}", faults=faults)
    missing = sorted(set(_features(ready)) - engine.features)
    if missing:
        raise UnsupportedFeature(f"this engine does not offer {', '.join(missing)}")
    _check_limits(ready, engine)
    return ready


def _check_input(request: generation_pb2.GenerateRequest) -> None:
    chosen = request.WhichOneof("input")
    if chosen is None:
        raise _fault("/prompt", "give a prompt or token ids")
    if chosen == "prompt" and not request.prompt:
        raise _fault("/prompt", "must not be empty")
    if chosen == "token_ids" and not request.token_ids.ids:
        raise _fault("/token_ids", "must not be empty")


def _faults(request: generation_pb2.GenerateRequest) -> Iterator[FieldFault]:
    sampling = request.sampling
    for field, value in sampling.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            yield FieldFault(f"/sampling/{field.name}", "must be a finite number")
    if sampling.HasField("temperature") and sampling.temperature < 0:
        yield FieldFault("/sampling/temperature", "must not be below 0")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        yield FieldFault("/sampling/top_p", "must be above 0 and at most 1")
    if sampling.HasField("top_k") and sampling.top_k < -1:
        yield FieldFault("/sampling/top_k", "must be -1 or 0 (all) or above")
    if sampling.HasField("min_p") and not 0 <= sampling.min_p <= 1:
        yield FieldFault("/sampling/min_p", "must be within 0 and 1")
    if sampling.HasField("repetition_penalty") and not sampling.repetition_penalty > 0:
        yield FieldFault("/sampling/repetition_penalty", "must be above 0")
    if sampling.HasField("num_sequences") and sampling.num_sequences == 0:
        yield FieldFault("/sampling/num_sequences", "must be above 0")
    stopping = request.stopping
    if stopping.HasField("max_tokens"):
        if stopping.max_tokens == 0:
            yield FieldFault("/stopping/max_tokens", "must be above 0")
        elif stopping.min_tokens > stopping.max_tokens:
            yield FieldFault("/stopping/min_tokens", "must not be above max_tokens")
    for index, condition in enumerate(stopping.conditions):
        kind = condition.WhichOneof("condition")
        if kind is None or (kind == "stop_text" and not condition.stop_text):
            yield FieldFault(f"/stopping/conditions/{index}", "must not be empty")


def _features(request: generation_pb2.GenerateRequest) -> Iterator[Feature]:
    """Those that the request needs. A value that is the same as none needs nothing."""
    sampling, response, kv = request.sampling, request.response, request.kv
    if sampling.min_p > 0:
        yield Feature.MIN_P
    if sampling.frequency_penalty != 0:
        yield Feature.FREQUENCY_PENALTY
    if sampling.presence_penalty != 0:
        yield Feature.PRESENCE_PENALTY
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1:
        yield Feature.REPETITION_PENALTY
    if sampling.num_sequences > 1:
        yield Feature.PARALLEL_SEQUENCES
    if response.return_prompt_logprobs or response.HasField("prompt_candidates"):
        yield Feature.PROMPT_LOGPROBS
    if response.return_output_logprobs or response.HasField("output_candidates"):
        yield Feature.OUTPUT_LOGPROBS
    if kv.HasField("session"):
        yield Feature.KV_SESSION
    if kv.bypass_prefix_cache:
        yield Feature.PREFIX_CACHE_BYPASS
    if kv.cache_salt:
        yield Feature.CACHE_SALT
    if request.HasField("guided"):
        yield Feature.GUIDED_DECODING
    if request.media:
        yield Feature.MEDIA
    if request.lora_name:
        yield Feature.LORA


def _check_limits(request: generation_pb2.GenerateRequest, engine: EngineDescription) -> None:
    if request.sampling.num_sequences > engine.max_sequences:
        raise _fault("/sampling/num_sequences", f"must be at most {engine.max_sequences}")
    most = engine.max_top_logprobs
    for name in ("prompt_candidates", "output_candidates"):
        selection: generation_pb2.CandidateTokenSelection = getattr(request.response, name)
        counted = selection.WhichOneof("selection") == "top_n"
        if counted and most is not None and selection.top_n > most:
            raise _fault(f"/response/{name}/top_n", f"must be at most {most}")
    longest = engine.max_output_tokens
    if longest is not None and request.stopping.max_tokens > longest:
        raise _fault("/stopping/max_tokens", f"must be at most {longest}")


def _fault(pointer: str, detail: str) -> InvalidArgument:
    fault = FieldFault(pointer, detail)
    return InvalidArgument(f"{_name(fault)} {detail}", faults=(fault,))


def _name(fault: FieldFault) -> str:
    return fault.pointer.removeprefix("/").replace("/", ".")
