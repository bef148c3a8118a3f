"""Requests, adapters, profiles and the engine's shape, as SGLang's clients order them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.domain.commands import (
    AbortRequests,
    LoadLora,
    ReconfigureServing,
    StartProfile,
    UnloadLora,
)
from app.domain.errors import ProfileNotRecording, UnsupportedOperation
from app.domain.kinds import DrainRule, EngineRole, ProfilerKind
from app.http.compat import works
from app.http.compat.asked import BIGGEST
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import BadBody, BadInput
from app.http.compat.sglang.bodies import (
    AbortBody,
    LoadBody,
    ProfileBody,
    RoleBody,
    ScaleBody,
    UnloadBody,
)
from app.http.compat.transfers import is_path
from app.http.compat.works import ScaleAsked

_RID = re.compile(r"[\x21-\x7e]{1,128}")
_SCALING_S = 600
_DEVICES = frozenset({"CPU", "GPU"})


@dataclass(frozen=True, slots=True)
class Switched:
    old_role: str
    new_role: str


@dataclass(frozen=True, slots=True)
class Scaled:
    old_size: int
    new_size: int


# ---- requests ----


async def abort(call: CompatCall, body: AbortBody) -> None:
    """Taken is all that the answer says, there as here: of an id that nobody knows too."""
    if not body.abort_all and not body.rid:
        raise BadBody("name a rid, or say abort_all; nothing was aborted")
    if body.abort_all:
        await call.give(AbortRequests(all=True))
        return
    if body.rid is None or not _RID.fullmatch(body.rid):
        raise BadBody("rid may have 1 to 128 characters without blanks; nothing was aborted")
    await call.give(AbortRequests(request_ids=(body.rid,)))


# ---- adapters ----


async def load_lora(call: CompatCall, body: LoadBody) -> Mapping[str, str]:
    if body.pinned:
        raise BadBody("pinned is not offered: no order keeps an adapter from being evicted")
    if not body.lora_name or ":" in body.lora_name:
        raise BadInput("lora_name must not be empty, nor have a colon")
    if not body.lora_path or not is_path(body.lora_path):
        raise BadInput("lora_path can't be the path of an adapter")
    await works.load_lora(call, LoadLora(name=body.lora_name, path=body.lora_path))
    return await _loaded(call)


async def unload_lora(call: CompatCall, body: UnloadBody) -> Mapping[str, str]:
    command = UnloadLora(name=body.lora_name)
    # Of one that is gone the engine knows nothing more, and a repetition is as good as the first.
    earlier = await call.earlier(command)
    if earlier is None:
        await works.unload_lora(call, (command, None))
    else:
        await call.ended(earlier)
    return await _loaded(call)


async def _loaded(call: CompatCall) -> Mapping[str, str]:
    return {lora.name: lora.path for lora in (await call.facts()).loras}


# ---- profiles ----


async def start_profile(call: CompatCall, body: ProfileBody) -> None:
    if body.output_dir is not None:
        raise BadBody("output_dir is not taken: the engine has a folder for profiles")
    if body.start_step is not None or body.profile_stages is not None:
        raise BadBody("a profile begins at once: start_step and profile_stages are not taken")
    if body.profile_by_stage or body.merge_profiles or body.detailed_annotations:
        raise BadBody(
            "profile_by_stage, merge_profiles and detailed_annotations are part of no order"
        )
    if body.num_steps is not None and body.num_steps < 1:
        raise BadBody("num_steps must be above 0")
    command = StartProfile(
        profiler=_profiler(body.activities),
        steps=body.num_steps,
        record_shapes=bool(body.record_shapes),
        with_stack=bool(body.with_stack),
    )
    await works.start_profile(call, command)


async def stop_profile(call: CompatCall, _: None) -> None:
    if not await works.stop_profile(call, None):
        raise ProfileNotRecording("there is no profile to stop")


def _profiler(activities: tuple[str, ...] | None) -> ProfilerKind:
    named = frozenset(activities or _DEVICES)
    if named <= _DEVICES:
        return ProfilerKind.TORCH
    if named == {"MEM"}:
        return ProfilerKind.MEMORY
    raise BadBody("activities may be CPU and GPU, or MEM by itself")


# ---- shape ----


async def switch_role(call: CompatCall, body: RoleBody) -> Switched:
    if body.prepare_only or body.decode_cuda_graph_bs or body.decode_cuda_graph_memory_gb:
        raise UnsupportedOperation("of a switch of roles only the role itself is ordered here")
    before = (await call.facts()).role
    rule = DrainRule.WAIT if DrainRule.WAIT in call.can.drain_rules else DrainRule.ABORT
    await call.give(ReconfigureServing(role=EngineRole(body.new_role), drain=rule))
    return Switched(role_word(before), body.new_role)


async def scale(call: CompatCall, body: ScaleBody) -> Scaled:
    size = body.new_ep_size
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= BIGGEST:
        raise BadBody("new_ep_size must be a positive integer")
    before = await works.world_size(call, include_dp=True)
    await works.scale(call, ScaleAsked(size, _SCALING_S))
    return Scaled(before, size)


async def is_scaling(call: CompatCall, _: None) -> Mapping[str, Any]:
    """Phases are not told apart."""
    return {
        "is_scaling_elastic_ep": await works.is_scaling(call, None),
        "effective_ep_size": await works.world_size(call, include_dp=True),
        "pending_ep_size": None,
        "scale_phase": None,
        "last_error": None,
    }


def role_word(role: EngineRole) -> str:
    """As SGLang has it in `disaggregation_mode`, where a server that does both has none."""
    return role.value if role in (EngineRole.PREFILL, EngineRole.DECODE) else "null"
