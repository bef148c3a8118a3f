"""What was asked of vLLM's endpoints, read as vLLM reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from app.domain.commands import AbortRequests, LoadLora, SetWeightVersion, StartProfile, UnloadLora
from app.domain.errors import UnsupportedOperation
from app.domain.kinds import ProfilerKind
from app.domain.weight_sessions import check_version
from app.http.compat.asked import BIGGEST, Asked, field
from app.http.compat.refusals import BadBody, BadInput
from app.http.compat.transfers import is_path
from app.http.compat.works import ScaleAsked

_DRAIN_S = 120
_MAX_IDS = 1000
_ID = re.compile(r"[\x21-\x7e]{1,128}")


def reset_asked(asked: Asked) -> None:
    """Requests are not put back for it: that some kept their blocks is told by `success`."""
    # `device` is of older releases, and named one cache of several.
    asked.only("reset_running_requests", "reset_external", "device")
    asked.flag("reset_running_requests", default=False)
    if asked.flag("reset_external", default=False):
        raise UnsupportedOperation("caches outside of the engine are not reset by this gateway")
    asked.agrees_with({"reset_external": False})


def abort_asked(asked: Asked) -> AbortRequests:
    """None named: all of them, as there. Not where something else is named: whoever has misspelt
    the one word that is known here meant a few, and would end all."""
    said = asked.raw_object()
    if said and "request_ids" not in said:
        raise BadBody("the body has no request_ids, only something else; nothing was aborted")
    named = said.get("request_ids")
    if named is None:
        named = []
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise BadBody("request_ids must be a list of texts; nothing was aborted")
    if len(named) > _MAX_IDS or not all(map(_ID.fullmatch, named)):
        told = f"request_ids may have {_MAX_IDS} ids of 1 to 128 characters without blanks"
        raise BadBody(f"{told}; nothing was aborted")
    ids = tuple(dict.fromkeys(named))
    return AbortRequests(request_ids=ids, all=not ids)


def load_asked(asked: Asked) -> LoadLora:
    asked.json_only()
    body = asked.model()
    name, path = field(body, "lora_name", str), field(body, "lora_path", str)
    if not name or not path:
        raise BadInput("Both 'lora_name' and 'lora_path' must be provided.")
    if not is_path(path):
        raise BadInput("'lora_path' can't be the path of an adapter")
    if field(body, "is_3d_lora_weight", bool, default=False):
        raise BadInput("is_3d_lora_weight is not known to this gateway")
    if field(body, "load_inplace", bool, default=False):
        raise BadInput("load_inplace is not offered: unload the adapter, then load it again")
    return LoadLora(name=name, path=path)


def unload_asked(asked: Asked) -> tuple[UnloadLora, int | None]:
    asked.json_only()
    body = asked.model()
    name = body.get("lora_name")
    if not isinstance(name, str) or not name:
        raise BadInput("'lora_name' needs to be provided to unload a LoRA adapter.")
    return UnloadLora(name=name), field(body, "lora_int_id", int, default=None)


def profile_asked(asked: Asked) -> StartProfile:
    body = asked.model(optional=True)
    for name in ("profile_prefix", "profiler_kwargs"):
        if body.get(name) is not None:
            raise BadBody(f"{name} is not taken by this gateway")
    if field(body, "delay_iterations", int, default=0):
        raise BadBody("delay_iterations is not taken by this gateway: a profile begins at once")
    steps = field(body, "max_iterations", int, default=0)
    if steps < 0:
        raise BadBody("max_iterations must be greater than or equal to 0")
    return StartProfile(profiler=ProfilerKind.TORCH, steps=steps or None)


def scale_asked(asked: Asked) -> ScaleAsked:
    if asked.content_type != "application/json":
        asked.json_only()
    body = asked.raw_object()
    if body.get("new_data_parallel_size") is None:
        raise BadBody("new_data_parallel_size is required")
    return ScaleAsked(
        _positive(body, "new_data_parallel_size"),
        _positive({"drain_timeout": _DRAIN_S, **body}, "drain_timeout"),
    )


def version_asked(asked: Asked) -> SetWeightVersion:
    version = field(asked.model(), "new_version", str)
    check_version(version, "/new_version")
    return SetWeightVersion(weight_version=version)


def with_dp_asked(asked: Asked) -> bool:
    return asked.flag("include_dp", default=True)


def format_asked(asked: Asked) -> str:
    return asked.word("config_format", ("text", "json"), "text")


def _positive(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= BIGGEST:
        raise BadBody(f"{name} must be a positive integer")
    return value
