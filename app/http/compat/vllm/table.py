"""The endpoints: for each its path and method, who may call it, what has to be behind it, how it is
read, what it does, and what it says. There is no branch anywhere else by endpoint."""

from __future__ import annotations

from starlette.responses import JSONResponse

from app.domain.kinds import CacheKind, OperationKind
from app.domain.scopes import Scope
from app.http.compat import answers, backing, works
from app.http.compat.rows import Row, Table, nothing, refuse
from app.http.compat.vllm import answers as own
from app.http.compat.vllm import pauses, readings, updates
from app.http.compat.vllm.shapes import Shape

_PAUSE = (Scope.PAUSE,)
_SLEEP = (Scope.PAUSE, Scope.RESOURCES)
_WEIGHTS = (Scope.WEIGHTS,)
_READ = (Scope.READ,)

_ROWS: tuple[Row, ...] = (
    Row(
        path="/abort_requests",
        scopes=(Scope.ABORT,),
        backed=backing.orders(OperationKind.ABORT_REQUESTS),
        read=readings.abort_asked,
        act=works.abort_requests,
        say=own.aborted,
        failing="Failed to abort requests",
    ),
    Row(
        path="/pause",
        scopes=_PAUSE,
        backed=backing.pauses,
        read=pauses.pause_asked,
        act=pauses.pause,
        say=answers.said(status="paused"),
        failing="Failed to pause generation",
    ),
    Row(
        path="/resume",
        scopes=_PAUSE,
        backed=backing.pauses,
        read=nothing,
        act=pauses.resume,
        say=answers.said(status="resumed"),
        failing="Failed to resume generation",
    ),
    Row(
        path="/is_paused",
        methods=("GET",),
        scopes=_READ,
        backed=backing.pauses,
        read=nothing,
        act=pauses.is_paused,
        say=answers.told("is_paused"),
        failing="Failed to fetch pause status",
    ),
    Row(
        path="/sleep",
        scopes=_SLEEP,
        backed=backing.sleeps,
        read=pauses.sleep_asked,
        act=pauses.sleep,
        say=own.sleeping,
    ),
    Row(
        path="/wake_up",
        scopes=_SLEEP,
        backed=backing.sleeps,
        read=pauses.tags_asked,
        act=pauses.wake_up,
        say=own.woken,
    ),
    Row(
        path="/is_sleeping",
        methods=("GET",),
        scopes=_READ,
        backed=backing.sleeps,
        read=nothing,
        act=pauses.is_sleeping,
        say=answers.told("is_sleeping"),
    ),
    Row(
        path="/release_kv_cache_memory",
        scopes=(Scope.RESOURCES,),
        backed=backing.drops_kv,
        read=nothing,
        act=pauses.release_kv_cache,
        say=answers.said(status="kv_cache_released"),
    ),
    Row(
        path="/reset_prefix_cache",
        scopes=(Scope.CACHE,),
        backed=backing.flushes(CacheKind.PREFIX),
        read=readings.reset_asked,
        act=works.reset_prefix_cache,
        say=answers.told("success"),
    ),
    Row(
        path="/reset_mm_cache",
        scopes=(Scope.CACHE,),
        backed=backing.flushes(CacheKind.MULTIMODAL),
        read=nothing,
        act=works.reset_mm_cache,
        say=answers.empty,
    ),
    Row(
        path="/reset_encoder_cache",
        scopes=(Scope.CACHE,),
        backed=backing.flushes(CacheKind.ENCODER),
        read=nothing,
        act=works.reset_encoder_cache,
        say=answers.empty,
    ),
    Row(
        path="/init_weight_transfer_engine",
        scopes=_WEIGHTS,
        backed=backing.updates,
        read=updates.init_asked,
        act=updates.init,
        say=answers.said(message="Weight transfer initialized"),
    ),
    Row(
        path="/start_weight_update",
        scopes=_WEIGHTS,
        backed=backing.updates,
        read=updates.start_asked,
        act=updates.start,
        say=answers.said(message="Weight update started"),
    ),
    Row(
        path="/start_draft_weight_update",
        scopes=_WEIGHTS,
        backed=backing.updates_drafts,
        read=updates.start_asked,
        act=updates.start_draft,
        say=answers.said(message="Draft weight update started"),
    ),
    Row(
        path="/update_weights",
        scopes=_WEIGHTS,
        backed=backing.updates,
        read=updates.update_asked,
        act=updates.update,
        say=answers.said(message="Weights updated"),
    ),
    Row(
        path="/finish_weight_update",
        scopes=_WEIGHTS,
        backed=backing.updates,
        read=updates.finish_asked,
        act=updates.finish,
        say=answers.said(message="Weight update finished"),
    ),
    Row(
        path="/shutdown_weight_transfer_engine",
        scopes=_WEIGHTS,
        backed=backing.updates,
        read=nothing,
        act=updates.shutdown,
        say=answers.said(message="Weight transfer shut down"),
    ),
    Row(
        path="/update_weight_version",
        scopes=_WEIGHTS,
        backed=backing.orders(OperationKind.SET_WEIGHT_VERSION),
        read=readings.version_asked,
        act=works.set_version,
        say=own.versioned,
    ),
    Row(
        path="/weight_info",
        methods=("GET",),
        scopes=_READ,
        backed=backing.always,
        read=nothing,
        act=works.weight_version,
        say=answers.told("weight_version"),
    ),
    Row(
        path="/get_world_size",
        methods=("GET",),
        scopes=_READ,
        backed=backing.always,
        read=readings.with_dp_asked,
        act=works.world_size,
        say=answers.told("world_size"),
    ),
    Row(
        path="/start_profile",
        scopes=(Scope.PROFILE,),
        backed=backing.profiles,
        read=readings.profile_asked,
        act=works.start_profile,
        say=answers.empty,
    ),
    Row(
        path="/stop_profile",
        scopes=(Scope.PROFILE,),
        backed=backing.profiles,
        read=nothing,
        act=works.stop_profile,
        say=answers.empty,
    ),
    Row(
        path="/v1/load_lora_adapter",
        scopes=(Scope.ADAPTERS,),
        backed=backing.orders(OperationKind.LOAD_LORA),
        read=readings.load_asked,
        act=works.load_lora,
        say=answers.text,
    ),
    Row(
        path="/v1/unload_lora_adapter",
        scopes=(Scope.ADAPTERS,),
        backed=backing.orders(OperationKind.UNLOAD_LORA),
        read=readings.unload_asked,
        act=works.unload_lora,
        say=answers.text,
    ),
    Row(
        path="/scale_elastic_ep",
        scopes=(Scope.RECONFIGURE,),
        backed=backing.scales,
        read=readings.scale_asked,
        act=works.scale,
        say=own.scaled,
    ),
    Row(
        path="/is_scaling_elastic_ep",
        scopes=_READ,
        backed=backing.scales,
        read=nothing,
        act=works.is_scaling,
        say=answers.told("is_scaling_elastic_ep"),
    ),
    Row(
        path="/server_info",
        methods=("GET",),
        scopes=_READ,
        backed=backing.always,
        read=readings.format_asked,
        act=works.server_info,
        say=JSONResponse,
    ),
    Row(
        path="/version",
        methods=("GET",),
        scopes=_READ,
        backed=backing.always,
        read=nothing,
        act=works.engine_version,
        say=answers.told("version"),
    ),
    Row(
        path="/health",
        methods=("GET",),
        scopes=_READ,
        backed=backing.always,
        read=nothing,
        act=works.health,
        say=answers.well,
    ),
    *(
        # Whoever calls one is told so, once it is known who that is.
        Row(
            path=path,
            methods=(method,),
            scopes=(),
            backed=backing.always,
            read=nothing,
            act=refuse(),
            say=answers.empty,
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

VLLM = Table(_ROWS, Shape)
