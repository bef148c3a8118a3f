"""Caches, adapters, profiles, requests and the engine's shape."""

from __future__ import annotations

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
)
from app.domain.kinds import (
    AbortOutcome,
    CacheKind,
    DrainRule,
    OperationKind,
    OperationState,
)
from app.domain.operation import JsonObject, JsonValue, Operation
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import BadInput, OrderFailed
from app.http.records import caller_of
from app.ledger.values import OperationFilter

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


async def reset_prefix_cache(call: CompatCall, _: None) -> bool:
    done = await call.give(FlushCaches(caches=(CacheKind.PREFIX,)))
    caches = cast("list[JsonObject]", (done.result or {}).get("caches", []))
    return all(not cache.get("blocks_in_use") for cache in caches)


async def reset_mm_cache(call: CompatCall, _: None) -> None:
    await call.give(FlushCaches(caches=(CacheKind.MULTIMODAL,)))


async def reset_encoder_cache(call: CompatCall, _: None) -> None:
    await call.give(FlushCaches(caches=(CacheKind.ENCODER,)))


# ---- requests ----


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


async def stop_profile(call: CompatCall, _: None) -> bool:
    """Whether there was one."""
    running = await _profile(call)
    if running is None:
        if (await call.facts()).profile is not None:
            raise ProfileNotRecording("the profile that runs was not begun at this gateway")
        return False
    caller = caller_of(call.request, call.who, call.note)
    await call.ended(await call.house.profiles.stop(running, caller))
    return True


async def _profile(call: CompatCall) -> Operation | None:
    wanted = OperationFilter(
        engine_id=call.engine.id,
        kinds=frozenset({OperationKind.PROFILE}),
        states=frozenset({OperationState.ACCEPTED, OperationState.RUNNING}),
    )
    page = await call.house.ledger.operations.page(wanted, size=1)
    return page.items[0] if page.items else None


# ---- shape ----


async def scale(call: CompatCall, asked: ScaleAsked) -> int:
    rule = DrainRule.WAIT if DrainRule.WAIT in call.can.drain_rules else DrainRule.ABORT
    command = ReconfigureServing(data_parallel_size=asked.size, drain=rule)
    await call.give(command, deadline_ms=asked.drain_s * 1000)
    return asked.size


async def is_scaling(call: CompatCall, _: None) -> bool:
    open_ones = await call.house.ledger.operations.open_ones(call.engine.id)
    return any(one.kind is OperationKind.RECONFIGURE_SERVING for one in open_ones)


# ---- what it is ----


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


async def world_size(call: CompatCall, include_dp: bool) -> int:
    size = call.can.world_size
    shape = call.engine.observed.info.get("parallelism")
    replicas = shape.get("data_parallel_size") if isinstance(shape, dict) else None
    if include_dp or not isinstance(replicas, int) or replicas < 1:
        return size
    return max(size // replicas, 1)


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


def _rows(operation: Operation, name: str) -> list[JsonObject]:
    return cast("list[JsonObject]", (operation.result or {}).get(name, []))
