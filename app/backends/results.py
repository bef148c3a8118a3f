"""Results of completed orders, out of an engine's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from google.protobuf.message import Message

from app.backends.spelling import count_of, text_of, word, words
from app.domain.kinds import OperationKind
from app.domain.operation import JsonValue
from app.rpc.openengine.v1 import admin_pb2, server_pb2

Result = dict[str, JsonValue]


def result_of(said: admin_pb2.OperationCompleted, kind: OperationKind) -> Result | None:
    """None: there is none of that kind in it. Raises Malformed."""
    if said.WhichOneof("result") != kind.value or kind not in _RESULTS:
        return None
    return _RESULTS[kind](getattr(said, kind.value))


def _caches(caches: Iterable[admin_pb2.FlushedCache]) -> list[JsonValue]:
    return [
        {
            "kind": word(admin_pb2.CacheKind, cache.kind) or "unknown",
            "blocks_freed": count_of(cache.blocks_freed),
            "blocks_in_use": count_of(cache.blocks_in_use),
        }
        for cache in caches
    ]


def _flushed(result: admin_pb2.FlushCachesResult) -> Result:
    return {"caches": _caches(result.caches)}


def _counts(result: Message) -> Result:
    """A result that consists of counts alone."""
    return {field.name: count_of(getattr(result, field.name)) for field in result.DESCRIPTOR.fields}


def _memory(memory: Iterable[admin_pb2.RankBytes]) -> list[JsonValue]:
    return [
        {
            "rank": held.rank,
            "resource": word(admin_pb2.ResourceKind, held.resource) or "unknown",
            "bytes_before": count_of(held.bytes_before),
            "bytes_after": count_of(held.bytes_after),
        }
        for held in memory
    ]


def _restored(
    result: admin_pb2.ReleaseResourcesResult | admin_pb2.RestoreResourcesResult,
) -> Result:
    """`released`: all that is released after it."""
    return {
        "release_epoch": count_of(result.release_epoch),
        "released": list(words(admin_pb2.ResourceKind, result.released)),
        "memory": _memory(result.memory),
    }


def _released(result: admin_pb2.ReleaseResourcesResult) -> Result:
    return {
        **_restored(result),
        "requests_finished": count_of(result.requests_finished),
        "requests_aborted": count_of(result.requests_aborted),
    }


def _updated(result: admin_pb2.UpdateWeightsResult) -> Result:
    """`sha256` of a rank's live parameters after the commit, as it read them back."""
    evidence: list[JsonValue] = [
        {
            "rank": one.rank,
            "tensors": count_of(one.tensors),
            "bytes": count_of(one.bytes),
            "sha256": one.sha256[:32].hex(),
        }
        for one in result.evidence
    ]
    switched: list[JsonValue] = [
        {"request_id": text_of(one.request_id), "output_tokens": count_of(one.output_tokens)}
        for one in result.switched
    ]
    return {
        "weight_version": text_of(result.weight_version),
        "previous_weight_version": text_of(result.previous_weight_version) or None,
        "evidence": evidence,
        "confirmed": list(words(admin_pb2.Component, result.confirmed)),
        "unconfirmed": list(words(admin_pb2.Component, result.unconfirmed)),
        "flushed": _caches(result.flushed),
        "updates_since_flush": count_of(result.updates_since_flush),
        "switched": switched,
    }


def _reconfigured(result: admin_pb2.ReconfigureServingResult) -> Result:
    return {
        "role": word(server_pb2.EngineRole, result.role) or "unknown",
        "tensor_parallel_size": result.tensor_parallel_size,
        "data_parallel_size": result.data_parallel_size,
        "max_running_requests": count_of(result.max_running_requests),
        "max_batched_tokens": count_of(result.max_batched_tokens),
    }


def _profiled(result: admin_pb2.ProfileResult) -> Result:
    """`path` is below the engine's root for such files."""
    artifacts: list[JsonValue] = [
        {
            "rank": one.rank,
            "path": text_of(one.path),
            "size_bytes": count_of(one.size_bytes),
            "sha256": one.sha256[:32].hex(),
            "media_type": text_of(one.media_type),
        }
        for one in result.artifacts
    ]
    return {
        "profile_id": text_of(result.profile_id),
        "kind": word(admin_pb2.ProfilerKind, result.kind) or "unknown",
        "artifacts": artifacts,
    }


_RESULTS: Mapping[OperationKind, Callable[..., Result]] = {
    OperationKind.FLUSH_CACHES: _flushed,
    OperationKind.PAUSE: _counts,
    OperationKind.RESUME: _counts,
    OperationKind.RELEASE_RESOURCES: _released,
    OperationKind.RESTORE_RESOURCES: _restored,
    OperationKind.UPDATE_WEIGHTS: _updated,
    OperationKind.RECONFIGURE_SERVING: _reconfigured,
    OperationKind.PROFILE: _profiled,
}
