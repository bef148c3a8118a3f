"""The endpoints: for each its path and method, who may call it, what has to be behind it, how it is
read, what it does, and what it says. There is no branch anywhere else by endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from app.domain.capabilities import Capabilities
from app.domain.kinds import (
    CacheKind,
    Component,
    ContentPolicy,
    OperationKind,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightSourceKind,
    WeightTransferBackend,
)
from app.domain.scopes import Scope
from app.http.compat import pauses, updates, works
from app.http.compat.asked import Asked
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import NeverOffered

Backed = Callable[[Capabilities], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`backed`: whether the engine's capabilities are enough for there to be such an endpoint.
    `failing`: the words of its refusals, where these are one text."""

    path: str
    method: str = "POST"
    scopes: tuple[Scope, ...]
    backed: Backed
    read: Callable[[Asked], Any]
    act: Callable[[CompatCall, Any], Awaitable[Any]]
    say: Callable[[Any], Response]
    failing: str | None = None

    async def answer(self, call: CompatCall) -> Response:
        return self.say(await self.act(call, self.read(call.asked)))


# ---- what has to be behind it ----


def _always(_: Capabilities) -> bool:
    return True


def _orders(*kinds: OperationKind) -> Backed:
    return lambda can: can.operations.issuperset(kinds)


def _flushes(cache: CacheKind) -> Backed:
    orders = _orders(OperationKind.FLUSH_CACHES)
    return lambda can: orders(can) and cache in can.cache_kinds


_pauses = _orders(OperationKind.PAUSE, OperationKind.RESUME)
_sleeps = _orders(
    OperationKind.PAUSE,
    OperationKind.RESUME,
    OperationKind.RELEASE_RESOURCES,
    OperationKind.RESTORE_RESOURCES,
)


def _drops_kv(can: Capabilities) -> bool:
    kept = can.resources.get(ResourceKind.KV_CACHE, frozenset())
    return _sleeps(can) and ContentPolicy.DISCARD in kept and not can.resources_together


def _updates(can: Capabilities) -> bool:
    """A pause is what makes an update safe, so that there is none without."""
    known = {WeightTransferBackend.NCCL.value, WeightTransferBackend.DISK.value}
    return (
        _pauses(can)
        and OperationKind.UPDATE_WEIGHTS in can.operations
        and WeightSourceKind.SESSION in can.weight_sources
        and not known.isdisjoint(can.weight_sessions)
    )


def _updates_drafts(can: Capabilities) -> bool:
    return _updates(can) and Component.DRAFT in can.components


def _profiles(can: Capabilities) -> bool:
    return OperationKind.PROFILE in can.operations and ProfilerKind.TORCH in can.profiler_kinds


def _scales(can: Capabilities) -> bool:
    reshapes = OperationKind.RECONFIGURE_SERVING in can.operations
    return reshapes and ReconfigurableField.DATA_PARALLEL_SIZE in can.reconfigurable


# ---- how it is read ----


def _nothing(_: Asked) -> None:
    """What vLLM does not look at is not looked at here either."""


async def _refuse(_call: CompatCall, _asked: None) -> None:
    raise NeverOffered


# ---- what it says ----


def _said(**told: Any) -> Callable[[Any], Response]:
    return lambda _: JSONResponse(told)


def _told(name: str) -> Callable[[Any], Response]:
    return lambda value: JSONResponse({name: value})


def _empty(_: Any) -> Response:
    return Response()


def _well(well: bool) -> Response:
    return Response(status_code=200 if well else 503)


def _text(said: str) -> Response:
    return Response(said)  # without a media type, as there


def _aborted(found: works.Aborted) -> Response:
    unsure = {"unverified": found.unverified} if found.unverified else {}
    return JSONResponse({"status": "aborted", "aborted": found.requests, **unsure})


def _sleeping(level: int) -> Response:
    return JSONResponse({"status": "sleeping", "level": level})


def _woken(woken: pauses.Woken) -> Response:
    status = "awake" if woken.awake else "sleeping"
    tags = None if woken.tags is None else list(woken.tags)
    return JSONResponse({"status": status, "tags": tags})


def _versioned(version: str) -> Response:
    return JSONResponse({"success": True, "new_version": version})


def _scaled(size: int) -> Response:
    return JSONResponse({"message": f"Scaled to {size} data parallel engines"})


_PAUSE = (Scope.PAUSE,)
_SLEEP = (Scope.PAUSE, Scope.RESOURCES)
_WEIGHTS = (Scope.WEIGHTS,)
_READ = (Scope.READ,)

ROWS: tuple[Row, ...] = (
    Row(
        path="/abort_requests",
        scopes=(Scope.ABORT,),
        backed=_orders(OperationKind.ABORT_REQUESTS),
        read=works.abort_asked,
        act=works.abort_requests,
        say=_aborted,
        failing="Failed to abort requests",
    ),
    Row(
        path="/pause",
        scopes=_PAUSE,
        backed=_pauses,
        read=pauses.pause_asked,
        act=pauses.pause,
        say=_said(status="paused"),
        failing="Failed to pause generation",
    ),
    Row(
        path="/resume",
        scopes=_PAUSE,
        backed=_pauses,
        read=_nothing,
        act=pauses.resume,
        say=_said(status="resumed"),
        failing="Failed to resume generation",
    ),
    Row(
        path="/is_paused",
        method="GET",
        scopes=_READ,
        backed=_pauses,
        read=_nothing,
        act=pauses.is_paused,
        say=_told("is_paused"),
        failing="Failed to fetch pause status",
    ),
    Row(
        path="/sleep",
        scopes=_SLEEP,
        backed=_sleeps,
        read=pauses.sleep_asked,
        act=pauses.sleep,
        say=_sleeping,
    ),
    Row(
        path="/wake_up",
        scopes=_SLEEP,
        backed=_sleeps,
        read=pauses.tags_asked,
        act=pauses.wake_up,
        say=_woken,
    ),
    Row(
        path="/is_sleeping",
        method="GET",
        scopes=_READ,
        backed=_sleeps,
        read=_nothing,
        act=pauses.is_sleeping,
        say=_told("is_sleeping"),
    ),
    Row(
        path="/release_kv_cache_memory",
        scopes=(Scope.RESOURCES,),
        backed=_drops_kv,
        read=_nothing,
        act=pauses.release_kv_cache,
        say=_said(status="kv_cache_released"),
    ),
    Row(
        path="/reset_prefix_cache",
        scopes=(Scope.CACHE,),
        backed=_flushes(CacheKind.PREFIX),
        read=works.reset_asked,
        act=works.reset_prefix_cache,
        say=_told("success"),
    ),
    Row(
        path="/reset_mm_cache",
        scopes=(Scope.CACHE,),
        backed=_flushes(CacheKind.MULTIMODAL),
        read=_nothing,
        act=works.reset_mm_cache,
        say=_empty,
    ),
    Row(
        path="/reset_encoder_cache",
        scopes=(Scope.CACHE,),
        backed=_flushes(CacheKind.ENCODER),
        read=_nothing,
        act=works.reset_encoder_cache,
        say=_empty,
    ),
    Row(
        path="/init_weight_transfer_engine",
        scopes=_WEIGHTS,
        backed=_updates,
        read=updates.init_asked,
        act=updates.init,
        say=_said(message="Weight transfer initialized"),
    ),
    Row(
        path="/start_weight_update",
        scopes=_WEIGHTS,
        backed=_updates,
        read=updates.start_asked,
        act=updates.start,
        say=_said(message="Weight update started"),
    ),
    Row(
        path="/start_draft_weight_update",
        scopes=_WEIGHTS,
        backed=_updates_drafts,
        read=updates.start_asked,
        act=updates.start_draft,
        say=_said(message="Draft weight update started"),
    ),
    Row(
        path="/update_weights",
        scopes=_WEIGHTS,
        backed=_updates,
        read=updates.update_asked,
        act=updates.update,
        say=_said(message="Weights updated"),
    ),
    Row(
        path="/finish_weight_update",
        scopes=_WEIGHTS,
        backed=_updates,
        read=updates.finish_asked,
        act=updates.finish,
        say=_said(message="Weight update finished"),
    ),
    Row(
        path="/shutdown_weight_transfer_engine",
        scopes=_WEIGHTS,
        backed=_updates,
        read=_nothing,
        act=updates.shutdown,
        say=_said(message="Weight transfer shut down"),
    ),
    Row(
        path="/update_weight_version",
        scopes=_WEIGHTS,
        backed=_orders(OperationKind.SET_WEIGHT_VERSION),
        read=works.version_asked,
        act=works.set_version,
        say=_versioned,
    ),
    Row(
        path="/weight_info",
        method="GET",
        scopes=_READ,
        backed=_always,
        read=_nothing,
        act=works.weight_version,
        say=_told("weight_version"),
    ),
    Row(
        path="/get_world_size",
        method="GET",
        scopes=_READ,
        backed=_always,
        read=works.with_dp_asked,
        act=works.world_size,
        say=_told("world_size"),
    ),
    Row(
        path="/start_profile",
        scopes=(Scope.PROFILE,),
        backed=_profiles,
        read=works.profile_asked,
        act=works.start_profile,
        say=_empty,
    ),
    Row(
        path="/stop_profile",
        scopes=(Scope.PROFILE,),
        backed=_profiles,
        read=_nothing,
        act=works.stop_profile,
        say=_empty,
    ),
    Row(
        path="/v1/load_lora_adapter",
        scopes=(Scope.ADAPTERS,),
        backed=_orders(OperationKind.LOAD_LORA),
        read=works.load_asked,
        act=works.load_lora,
        say=_text,
    ),
    Row(
        path="/v1/unload_lora_adapter",
        scopes=(Scope.ADAPTERS,),
        backed=_orders(OperationKind.UNLOAD_LORA),
        read=works.unload_asked,
        act=works.unload_lora,
        say=_text,
    ),
    Row(
        path="/scale_elastic_ep",
        scopes=(Scope.RECONFIGURE,),
        backed=_scales,
        read=works.scale_asked,
        act=works.scale,
        say=_scaled,
    ),
    Row(
        path="/is_scaling_elastic_ep",
        scopes=_READ,
        backed=_scales,
        read=_nothing,
        act=works.is_scaling,
        say=_told("is_scaling_elastic_ep"),
    ),
    Row(
        path="/server_info",
        method="GET",
        scopes=_READ,
        backed=_always,
        read=works.format_asked,
        act=works.server_info,
        say=JSONResponse,
    ),
    Row(
        path="/version",
        method="GET",
        scopes=_READ,
        backed=_always,
        read=_nothing,
        act=works.engine_version,
        say=_told("version"),
    ),
    Row(
        path="/health",
        method="GET",
        scopes=_READ,
        backed=_always,
        read=_nothing,
        act=works.health,
        say=_well,
    ),
    *(
        # Whoever calls one is told so, once it is known who that is.
        Row(
            path=path,
            method=method,
            scopes=(),
            backed=_always,
            read=_nothing,
            act=_refuse,
            say=_empty,
        )
        for path, method in (
            ("/collective_rpc", "POST"),
            ("/invocations", "POST"),
            ("/fault_tolerance/apply", "POST"),
            ("/fault_tolerance/status", "GET"),
            ("/adapters", "POST"),
            ("/adapters/{name:path}", "DELETE"),
            ("/weight_checker", "POST"),
        )
    ),
)
