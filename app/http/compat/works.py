"""Caches, adapters, profiles, requests and the engine's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from app.domain.commands import (
    AbortRequests,
    FlushCaches,
    LoadLora,
    ReconfigureServing,
    SetWeightVersion,
    StartProfile,
    UnloadLora,
)
from app.domain.errors import (
    EngineFault,
    EngineUnreachable,
    ProfileNotRecording,
    ProfileRunning,
    UnknownLora,
    UnsupportedOperation,
)
from app.domain.kinds import (
    AbortOutcome,
    CacheKind,
    DrainRule,
    OperationKind,
    OperationState,
    ProfilerKind,
)
from app.domain.operation import JsonObject, JsonValue, Operation
from app.domain.weight_sessions import check_version
from app.http.compat.asked import BIGGEST, Asked, field
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import BadBody, BadInput, OrderFailed
from app.http.compat.transfers import is_path
from app.http.records import caller_of
from app.ledger.values import OperationFilter

_DRAIN_S = 120
_MAX_IDS = 1000
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ACTIVE = (
    "A profiling session is already active. Call /stop_profile before starting another session."
)


@dataclass(frozen=True, slots=True)
class Aborted:
    """`unverified`: of so many it is not known whether they have ended."""

    requests: int
    unverified: int = 0


@dataclass(frozen=True, slots=True)
class ScaleAsked:
    size: int
    drain_s: int


# ---- caches ----


def reset_asked(asked: Asked) -> None:
    """Requests are not put back for it: that some kept their blocks is told by `success`."""
    # `device` is of older releases, and named one cache of several.
    asked.only("reset_running_requests", "reset_external", "device")
    asked.flag("reset_running_requests", default=False)
    if asked.flag("reset_external", default=False):
        raise UnsupportedOperation("caches outside of the engine are not reset by this gateway")
    asked.agrees_with({"reset_external": False})


async def reset_prefix_cache(call: CompatCall, _: None) -> bool:
    done = await call.give(FlushCaches(caches=(CacheKind.PREFIX,)))
    caches = cast("list[JsonObject]", (done.result or {}).get("caches", []))
    return all(not cache.get("blocks_in_use") for cache in caches)


async def reset_mm_cache(call: CompatCall, _: None) -> None:
    await call.give(FlushCaches(caches=(CacheKind.MULTIMODAL,)))


async def reset_encoder_cache(call: CompatCall, _: None) -> None:
    await call.give(FlushCaches(caches=(CacheKind.ENCODER,)))


# ---- requests ----


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


async def abort_requests(call: CompatCall, command: AbortRequests) -> Aborted:
    if command.all:
        return await _abort_all(call, command)
    done = await call.give(command)
    outcomes = [one.get("outcome") for one in _rows(done, "requests")]
    return Aborted(outcomes.count(AbortOutcome.ABORTED), outcomes.count(AbortOutcome.UNVERIFIED))


async def _abort_all(call: CompatCall, command: AbortRequests) -> Aborted:
    """Counted by what was there before and is there after. Raises EngineFault where that is not to
    be had: a number would be made up."""
    command.check_supported(call.can)
    before = await _in_flight(call)
    done = await call.give(command)
    if (done.result or {}).get("all") == AbortOutcome.UNVERIFIED:
        raise EngineFault("it is not known whether the requests have ended", operation_id=done.id)
    return Aborted(max(0, before - await _in_flight(call)))


async def _in_flight(call: CompatCall) -> int:
    facts = await call.facts()
    load = await call.house.fleet.load(call.engine.id)
    running, queued = load.get("running_requests"), load.get("queued_requests")
    if not isinstance(running, int):
        raise EngineFault("this engine does not tell how many requests it has")
    held = 0 if facts.pause is None else facts.pause.requests_held
    return running + (queued if isinstance(queued, int) else 0) + held


# ---- adapters ----


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


async def load_lora(call: CompatCall, command: LoadLora) -> str:
    if command.name in call.can.models:
        raise BadInput("The lora adapter's name conflicts with a served base model.")
    loaded = any(lora.name == command.name for lora in (await call.facts()).loras)
    if loaded and await call.earlier(command) is None:
        raise BadInput("A lora adapter of that name has already been loaded.")
    await call.give(command)
    return f"Success: LoRA adapter '{command.name}' added successfully."


async def unload_lora(call: CompatCall, asked: tuple[UnloadLora, int | None]) -> str:
    command, number = asked
    for lora in (await call.facts()).loras:
        if lora.name == command.name and number not in (None, lora.id):
            raise UnknownLora("no adapter of that name has that id")
    await call.give(command)
    return f"Success: LoRA adapter '{command.name}' removed successfully."


# ---- profiles ----


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


async def start_profile(call: CompatCall, command: StartProfile) -> None:
    """Waited for until it records; its end comes with the stop."""
    running = await _profile(call)
    if running is not None and running.actor != call.actor:
        raise ProfileRunning(_ACTIVE, operation_id=running.id)
    if running is None and (await call.facts()).profile is not None:
        raise ProfileRunning(_ACTIVE)
    operation = await call.begin(command)
    operation = await call.until(operation, lambda one: one.engine_operation_id is not None)
    if operation.done and operation.state is not OperationState.SUCCEEDED:
        raise OrderFailed(operation)


async def stop_profile(call: CompatCall, _: None) -> None:
    """Nothing to stop is no error there."""
    running = await _profile(call)
    if running is None:
        if (await call.facts()).profile is not None:
            raise ProfileNotRecording("the profile that runs was not begun at this gateway")
        return
    caller = caller_of(call.request, call.who, f"vLLM endpoint {call.name}")
    await call.ended(await call.house.profiles.stop(running, caller))


async def _profile(call: CompatCall) -> Operation | None:
    wanted = OperationFilter(
        engine_id=call.engine.id,
        kinds=frozenset({OperationKind.PROFILE}),
        states=frozenset({OperationState.ACCEPTED, OperationState.RUNNING}),
    )
    page = await call.house.ledger.operations.page(wanted, size=1)
    return page.items[0] if page.items else None


# ---- shape ----


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


async def scale(call: CompatCall, asked: ScaleAsked) -> int:
    rule = DrainRule.WAIT if DrainRule.WAIT in call.can.drain_rules else DrainRule.ABORT
    command = ReconfigureServing(data_parallel_size=asked.size, drain=rule)
    await call.give(command, deadline_ms=asked.drain_s * 1000)
    return asked.size


async def is_scaling(call: CompatCall, _: None) -> bool:
    open_ones = await call.house.ledger.operations.open_ones(call.engine.id)
    return any(one.kind is OperationKind.RECONFIGURE_SERVING for one in open_ones)


# ---- what it is ----


def version_asked(asked: Asked) -> SetWeightVersion:
    version = field(asked.model(), "new_version", str)
    check_version(version, "/new_version")
    return SetWeightVersion(weight_version=version)


async def set_version(call: CompatCall, command: SetWeightVersion) -> str:
    await call.give(command)
    return command.weight_version


async def weight_version(call: CompatCall, _: None) -> str:
    return (await call.facts()).weights.version or "default"


async def health(call: CompatCall, _: None) -> bool:
    """Whether it answers; paused or asleep it is well."""
    try:
        await call.facts()
    except (EngineFault, EngineUnreachable):
        return False
    return True


def with_dp_asked(asked: Asked) -> bool:
    return asked.flag("include_dp", default=True)


async def world_size(call: CompatCall, include_dp: bool) -> int:
    size = call.can.world_size
    shape = call.engine.observed.info.get("parallelism")
    replicas = shape.get("data_parallel_size") if isinstance(shape, dict) else None
    if include_dp or not isinstance(replicas, int) or replicas < 1:
        return size
    return max(size // replicas, 1)


def format_asked(asked: Asked) -> str:
    return asked.word("config_format", ("text", "json"), "text")


async def server_info(call: CompatCall, form: str) -> Mapping[str, Any]:
    """What this gateway knows of it, where vLLM has its own configuration."""
    found = await call.house.fleet.discover(call.engine.id)
    known = dict(found.info)
    text = ", ".join(f"{name}={value!r}" for name, value in known.items())
    config: JsonValue = known if form == "json" else text
    return {"vllm_config": config, "vllm_env": {}, "system_env": {}}


async def engine_version(call: CompatCall, _: None) -> str:
    found = await call.house.fleet.discover(call.engine.id)
    return str(found.info.get("engine_version") or "")


def _positive(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= BIGGEST:
        raise BadBody(f"{name} must be a positive integer")
    return value


def _rows(operation: Operation, name: str) -> list[JsonObject]:
    return cast("list[JsonObject]", (operation.result or {}).get(name, []))
