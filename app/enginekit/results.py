"""The results of completed orders as messages: one row per kind that can be carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from app.domain.kinds import (
    CacheKind,
    Component,
    EngineRole,
    OperationKind,
    ProfilerKind,
    ResourceKind,
)
from app.enginekit.vocabulary import (
    CACHE_KIND,
    COMPONENT,
    ENGINE_ROLE,
    PROFILER_KIND,
    RESOURCE_KIND,
)
from app.rpc.openengine.v1 import admin_pb2

Result = dict[str, Any]


def set_result(message: admin_pb2.OperationCompleted, kind: OperationKind, result: Result) -> None:
    """`result` as the function that carried the order out has made it."""
    _RESULTS[kind](message, result)


def _flushed_caches(caches: list[Result]) -> list[admin_pb2.FlushedCache]:
    return [
        admin_pb2.FlushedCache(
            kind=CACHE_KIND.number(CacheKind(cache["kind"])),
            blocks_freed=cache["blocks_freed"],
            blocks_in_use=cache["blocks_in_use"],
        )
        for cache in caches
    ]


def _flushed(message: admin_pb2.OperationCompleted, result: Result) -> None:
    told = admin_pb2.FlushCachesResult(caches=_flushed_caches(result["caches"]))
    message.flush_caches.CopyFrom(told)


def _paused(message: admin_pb2.OperationCompleted, result: Result) -> None:
    message.pause.CopyFrom(
        admin_pb2.PauseResult(
            pause_epoch=result["pause_epoch"],
            requests_finished=result["requests_finished"],
            requests_aborted=result["requests_aborted"],
            requests_kept=result["requests_kept"],
        )
    )


def _resumed(message: admin_pb2.OperationCompleted, result: Result) -> None:
    message.resume.CopyFrom(
        admin_pb2.ResumeResult(
            pause_epoch=result["pause_epoch"],
            requests_continued=result["requests_continued"],
            requests_admitted=result["requests_admitted"],
        )
    )


def _memory(result: Result) -> list[admin_pb2.RankBytes]:
    return [
        admin_pb2.RankBytes(
            rank=held["rank"],
            resource=RESOURCE_KIND.number(ResourceKind(held["resource"])),
            bytes_before=held["bytes_before"],
            bytes_after=held["bytes_after"],
        )
        for held in result["memory"]
    ]


def _names(result: Result) -> list[Any]:
    return RESOURCE_KIND.numbers(frozenset(ResourceKind(name) for name in result["released"]))


def _released(message: admin_pb2.OperationCompleted, result: Result) -> None:
    message.release_resources.CopyFrom(
        admin_pb2.ReleaseResourcesResult(
            release_epoch=result["release_epoch"],
            released=_names(result),
            memory=_memory(result),
            requests_finished=result["requests_finished"],
            requests_aborted=result["requests_aborted"],
        )
    )


def _restored(message: admin_pb2.OperationCompleted, result: Result) -> None:
    message.restore_resources.CopyFrom(
        admin_pb2.RestoreResourcesResult(
            release_epoch=result["release_epoch"],
            released=_names(result),
            memory=_memory(result),
        )
    )


def _updated(message: admin_pb2.OperationCompleted, result: Result) -> None:
    message.update_weights.CopyFrom(
        admin_pb2.UpdateWeightsResult(
            weight_version=result["weight_version"],
            previous_weight_version=result["previous_weight_version"],
            evidence=[
                admin_pb2.RankEvidence(
                    rank=one["rank"],
                    tensors=one["tensors"],
                    bytes=one["bytes"],
                    sha256=bytes.fromhex(one["sha256"]),
                )
                for one in result["evidence"]
            ],
            confirmed=[COMPONENT.number(Component(name)) for name in result["confirmed"]],
            unconfirmed=[COMPONENT.number(Component(name)) for name in result["unconfirmed"]],
            flushed=_flushed_caches(result["flushed"]),
            updates_since_flush=result["updates_since_flush"],
            switched=[
                admin_pb2.SwitchedRequest(**one)
                # A store that an earlier release wrote does not have it.
                for one in result.get("switched", ())
            ],
        )
    )


def _reconfigured(message: admin_pb2.OperationCompleted, result: Result) -> None:
    message.reconfigure_serving.CopyFrom(
        admin_pb2.ReconfigureServingResult(
            role=ENGINE_ROLE.number(EngineRole(result["role"])),
            tensor_parallel_size=result["tensor_parallel_size"],
            data_parallel_size=result["data_parallel_size"],
            max_running_requests=result["max_running_requests"],
            max_batched_tokens=result["max_batched_tokens"],
        )
    )


def _profiled(message: admin_pb2.OperationCompleted, result: Result) -> None:
    message.profile.CopyFrom(
        admin_pb2.ProfileResult(
            profile_id=result["profile_id"],
            kind=PROFILER_KIND.number(ProfilerKind(result["kind"])),
            artifacts=[
                admin_pb2.ProfileArtifact(
                    rank=artifact["rank"],
                    path=artifact["path"],
                    size_bytes=artifact["size_bytes"],
                    sha256=bytes.fromhex(artifact["sha256"]),
                    media_type=artifact["media_type"],
                )
                for artifact in result["artifacts"]
            ],
        )
    )


def _adapted(message: admin_pb2.OperationCompleted, result: Result) -> None:
    """Ordered through `Control`, which answers with the adapter itself."""


_RESULTS: Mapping[OperationKind, Callable[[admin_pb2.OperationCompleted, Result], None]] = {
    OperationKind.FLUSH_CACHES: _flushed,
    OperationKind.PAUSE: _paused,
    OperationKind.RESUME: _resumed,
    OperationKind.RELEASE_RESOURCES: _released,
    OperationKind.RESTORE_RESOURCES: _restored,
    OperationKind.UPDATE_WEIGHTS: _updated,
    OperationKind.PROFILE: _profiled,
    OperationKind.RECONFIGURE_SERVING: _reconfigured,
    OperationKind.LOAD_LORA: _adapted,
    OperationKind.UNLOAD_LORA: _adapted,
}
