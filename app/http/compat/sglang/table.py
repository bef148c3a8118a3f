"""The endpoints of SGLang: for each its path and methods, who may call it, what has to be behind
it, how it is read, what it does, and what it says. There is no branch anywhere else by endpoint."""

from __future__ import annotations

from starlette.responses import JSONResponse

from app.domain.kinds import CacheKind, OperationKind, ReconfigurableField
from app.domain.scopes import Scope
from app.http.compat import answers, backing
from app.http.compat import works as common
from app.http.compat.rows import Row, Table, nothing, refuse
from app.http.compat.sglang import answers as own
from app.http.compat.sglang import bodies, info, memory, payloads, pieces, weights, works
from app.http.compat.sglang.bodies import body_of
from app.http.compat.sglang.shapes import Style, shape_of

_BOTH = ("GET", "POST")
_GET = ("GET",)
_WEIGHTS = (Scope.WEIGHTS,)
_READ = (Scope.READ,)
_MEMORY = (Scope.PAUSE, Scope.RESOURCES)
_PICKLED = (
    "There is no order of this gateway for what is pickled here, and nothing is passed on unread. "
    "Adapters come from a folder; weights from a checkpoint on disk, or from a process group."
)
_NO_ORDER = "There is no order of this gateway for that, and nothing is passed on unread."

_ORDERS: tuple[Row, ...] = (
    Row(
        path="/flush_cache",
        methods=_BOTH,
        scopes=(Scope.CACHE,),
        backed=backing.flushes(CacheKind.PREFIX),
        read=bodies.timeout_asked,
        act=memory.flush,
        say=own.flushed,
        failing=Style.TEXT,
    ),
    Row(
        path="/pause_generation",
        scopes=(Scope.PAUSE,),
        backed=backing.pauses,
        read=body_of(bodies.PauseBody),
        act=memory.pause,
        say=answers.said(message="Generation paused successfully.", status="ok"),
    ),
    Row(
        path="/continue_generation",
        scopes=(Scope.PAUSE,),
        backed=backing.pauses,
        read=body_of(bodies.ContinueBody),
        act=memory.proceed,
        say=answers.said(message="Generation continued successfully.", status="ok"),
    ),
    Row(
        path="/release_memory_occupation",
        methods=_BOTH,
        scopes=_MEMORY,
        backed=backing.sleeps,
        read=body_of(bodies.TagsBody),
        act=memory.release,
        say=own.null,
    ),
    Row(
        path="/resume_memory_occupation",
        methods=_BOTH,
        scopes=_MEMORY,
        backed=backing.sleeps,
        read=body_of(bodies.TagsBody),
        act=memory.resume,
        say=own.null,
    ),
    Row(
        path="/abort_request",
        scopes=(Scope.ABORT,),
        backed=backing.orders(OperationKind.ABORT_REQUESTS),
        read=body_of(bodies.AbortBody),
        act=works.abort,
        say=answers.empty,
    ),
    Row(
        path="/update_weights_from_disk",
        scopes=_WEIGHTS,
        backed=backing.updates_by_disk,
        read=body_of(bodies.DiskBody),
        act=weights.from_disk,
        say=own.updated,
        failing=Style.CHECKPOINT,
    ),
    Row(
        path="/init_weights_update_group",
        scopes=_WEIGHTS,
        backed=backing.updates_by_group,
        read=body_of(bodies.GroupBody),
        act=pieces.init,
        say=lambda said: answers.said(success=True, message=said)(None),
        failing=Style.SUCCESS,
    ),
    Row(
        path="/destroy_weights_update_group",
        scopes=_WEIGHTS,
        backed=backing.updates_by_group,
        read=body_of(bodies.GroupNameBody),
        act=pieces.destroy,
        say=answers.said(success=True, message="The group is given up."),
        failing=Style.SUCCESS,
    ),
    Row(
        path="/begin_weight_update",
        scopes=_WEIGHTS,
        backed=backing.updates_in_pieces,
        read=body_of(bodies.BeginBody),
        act=pieces.begin,
        say=answers.said(success=True, message="Success"),
        failing=Style.SUCCESS,
    ),
    Row(
        path="/update_weights_from_distributed",
        scopes=_WEIGHTS,
        backed=backing.updates_by_group,
        read=body_of(bodies.DistributedBody),
        act=pieces.piece,
        say=answers.said(success=True, message="Success"),
        failing=Style.SUCCESS,
    ),
    Row(
        path="/update_weights_from_tensor",
        # Refused with a reason where it is off, which the scopes of a row would come before.
        scopes=(),
        backed=backing.always,
        read=lambda asked: asked,
        act=payloads.tensors,
        say=answers.said(success=True, message="Success"),
        failing=Style.SUCCESS,
    ),
    Row(
        path="/end_weight_update",
        scopes=_WEIGHTS,
        backed=backing.updates_in_pieces,
        read=body_of(bodies.EndBody),
        act=weights.end,
        say=answers.said(success=True, message="Success"),
        failing=Style.SUCCESS,
    ),
    Row(
        path="/update_weight_version",
        scopes=_WEIGHTS,
        backed=backing.orders(OperationKind.SET_WEIGHT_VERSION),
        read=body_of(bodies.VersionBody),
        act=weights.set_version,
        say=own.versioned,
        failing=Style.SUCCESS,
    ),
    Row(
        path="/load_lora_adapter",
        scopes=(Scope.ADAPTERS,),
        backed=backing.orders(OperationKind.LOAD_LORA),
        read=body_of(bodies.LoadBody),
        act=works.load_lora,
        say=own.adapters,
        failing=Style.ADAPTER,
    ),
    Row(
        path="/unload_lora_adapter",
        scopes=(Scope.ADAPTERS,),
        backed=backing.orders(OperationKind.UNLOAD_LORA),
        read=body_of(bodies.UnloadBody),
        act=works.unload_lora,
        say=own.adapters,
        failing=Style.ADAPTER,
    ),
    Row(
        path="/start_profile",
        methods=_BOTH,
        scopes=(Scope.PROFILE,),
        backed=backing.profiles,
        read=body_of(bodies.ProfileBody, optional=True),
        act=works.start_profile,
        say=lambda _: answers.text("Start profiling.\n"),
    ),
    Row(
        path="/stop_profile",
        methods=_BOTH,
        scopes=(Scope.PROFILE,),
        backed=backing.profiles,
        read=nothing,
        act=works.stop_profile,
        say=lambda _: answers.text("The profile is stopped and written.\n"),
    ),
    Row(
        path="/pd_role_switch",
        scopes=(Scope.RECONFIGURE,),
        backed=backing.reshapes(ReconfigurableField.ROLE),
        read=body_of(bodies.RoleBody),
        act=works.switch_role,
        say=own.switched,
        failing=Style.ROLE,
    ),
    Row(
        path="/scale_elastic_ep",
        scopes=(Scope.RECONFIGURE,),
        backed=backing.scales,
        read=body_of(bodies.ScaleBody, optional=True),
        act=works.scale,
        say=own.scaled,
        failing=Style.FLAT,
    ),
)

_READINGS: tuple[Row, ...] = tuple(
    Row(path=path, methods=_GET, scopes=_READ, backed=backed, read=read, act=act, say=say)
    for path, backed, read, act, say in (
        ("/health", backing.always, nothing, common.health, answers.well),
        ("/health_generate", backing.always, nothing, common.health, answers.well),
        ("/ping", backing.always, nothing, common.health, answers.well),
        ("/ready", backing.always, nothing, memory.ready, answers.well),
        ("/model_info", backing.always, nothing, info.model_info, JSONResponse),
        ("/get_model_info", backing.always, nothing, info.model_info, JSONResponse),
        ("/server_info", backing.always, nothing, info.server_info, JSONResponse),
        ("/get_server_info", backing.always, nothing, info.server_info, JSONResponse),
        ("/v1/models", backing.always, nothing, info.models, JSONResponse),
        ("/v1/loads", backing.always, info.rank_asked, info.loads, JSONResponse),
        (
            "/get_weight_version",
            backing.always,
            nothing,
            common.weight_version,
            answers.told("weight_version"),
        ),
        (
            "/weight_version",
            backing.always,
            nothing,
            common.weight_version,
            answers.told("weight_version"),
        ),
        ("/is_scaling_elastic_ep", backing.scales, nothing, works.is_scaling, JSONResponse),
    )
)

_REFUSED: tuple[Row, ...] = tuple(
    # Whoever calls one is told so, once it is known who that is.
    Row(
        path=path,
        methods=methods,
        scopes=(),
        backed=backing.always,
        read=nothing,
        act=refuse(why),
        say=answers.empty,
    )
    for why, methods, paths in (
        (
            _PICKLED,
            ("POST",),
            (
                "/update_weights_from_ipc",
                "/load_lora_adapter_from_tensors",
            ),
        ),
        (
            _NO_ORDER,
            _BOTH,
            (
                "/weights_checker",
                "/get_weights_by_name",
                "/configure_logging",
                "/freeze_gc",
                "/set_trace_level",
                "/slow_down",
                "/start_expert_distribution_record",
                "/stop_expert_distribution_record",
                "/dump_expert_distribution_record",
            ),
        ),
        (_NO_ORDER, ("POST", "PUT"), ("/set_internal_state",)),
        (_NO_ORDER, ("GET", "PUT", "DELETE"), ("/hicache/storage-backend",)),
        (
            _NO_ORDER,
            ("POST",),
            (
                "/hicache/storage-backend/clear",
                "/init_weights_send_group_for_remote_instance",
                "/send_weights_to_remote_instance",
                "/add_external_corpus",
                "/remove_external_corpus",
                "/pull_weights",
                "/post_process_weights",
                "/dumper/{method}",
            ),
        ),
        (
            _NO_ORDER,
            _GET,
            (
                "/list_external_corpora",
                "/remote_instance_transfer_engine_info",
                "/get_remote_instance_transfer_engine_info",
            ),
        ),
    )
    for path in paths
)

SGLANG = Table((*_ORDERS, *_READINGS, *_REFUSED), shape_of)
