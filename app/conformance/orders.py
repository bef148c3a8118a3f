"""Orders that fit the engine at hand, from what its profile says; no call is made here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from app.rpc.openengine.v1 import admin_pb2 as pb

Kind: TypeAlias = pb.AdminOperationKind.ValueType
STREAMED: Mapping[Kind, type[Any]] = {
    pb.ADMIN_OPERATION_KIND_FLUSH_CACHES: pb.FlushCachesRequest,
    pb.ADMIN_OPERATION_KIND_PAUSE: pb.PauseRequest,
    pb.ADMIN_OPERATION_KIND_RESUME: pb.ResumeRequest,
    pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES: pb.ReleaseResourcesRequest,
    pb.ADMIN_OPERATION_KIND_RESTORE_RESOURCES: pb.RestoreResourcesRequest,
    pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS: pb.UpdateWeightsRequest,
    pb.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING: pb.ReconfigureServingRequest,
}
"""Orders whose RPC is a stream of events, by kind."""

UNKNOWN_NUMBER: Any = 9_999
"""No enum of the schema has it."""


def named(enum: Any, number: int) -> str:
    """Its name in the schema; of a number that the schema does not have, the number."""
    names: dict[int, str] = {value: name for name, value in enum.items()}
    return names.get(number, str(number))


def name_of(kind: Kind) -> str:
    """`release_resources`"""
    return named(pb.AdminOperationKind, kind).removeprefix("ADMIN_OPERATION_KIND_").lower()


class Orders:
    """Builds requests; each gets a new key unless one is given."""

    def __init__(self, profile: pb.AdminProfile, new_key: Callable[[], str]) -> None:
        self._profile = profile
        self._new_key = new_key

    def of(self, request: type[Any], **fields: Any) -> Any:
        """With a key, and with a target where the engine serves several models."""
        fields.setdefault("idempotency_key", self._new_key())
        if len(self._profile.models) > 1 and "model" not in fields:
            fields.setdefault("whole_engine", pb.WholeEngine())
        return request(**fields)

    def pause(self, mode: pb.PauseMode.ValueType, **fields: Any) -> pb.PauseRequest:
        request: pb.PauseRequest = self.of(pb.PauseRequest, mode=mode, **fields)
        return request

    def resume(self, epoch: int, **fields: Any) -> pb.ResumeRequest:
        request: pb.ResumeRequest = self.of(pb.ResumeRequest, pause_epoch=epoch, **fields)
        return request

    def flush(self, **fields: Any) -> pb.FlushCachesRequest:
        fields.setdefault("caches", list(self._profile.cache_kinds)[:1])
        request: pb.FlushCachesRequest = self.of(pb.FlushCachesRequest, **fields)
        return request

    def release(self, **fields: Any) -> pb.ReleaseResourcesRequest:
        support = self._profile.resources[0]
        fields.setdefault("resources", [support.kind])
        fields.setdefault("content", support.content[0])
        fields.setdefault("drain", self._drain_rule())
        request: pb.ReleaseResourcesRequest = self.of(pb.ReleaseResourcesRequest, **fields)
        return request

    def restore(self, epoch: int, **fields: Any) -> pb.RestoreResourcesRequest:
        request: pb.RestoreResourcesRequest = self.of(
            pb.RestoreResourcesRequest, release_epoch=epoch, **fields
        )
        return request

    def update(self, path: str, **fields: Any) -> pb.UpdateWeightsRequest:
        """From disk, pausing and resuming by itself."""
        fields.setdefault("disk", pb.DiskWeights(path=path))
        return self.load(**fields)

    def load(self, **fields: Any) -> pb.UpdateWeightsRequest:
        """An update from the source that a field names."""
        mode = (*self._profile.pause_modes, pb.PAUSE_MODE_DRAIN)[0]
        fields.setdefault("idempotency_key", self._new_key())
        fields.setdefault("weight_version", f"{fields['idempotency_key']}-weights")
        fields.setdefault("cache_policy", (*self._profile.cache_policies, pb.CACHE_POLICY_FLUSH)[0])
        fields.setdefault(
            "components", (list(self._profile.components) or [pb.COMPONENT_TARGET])[:1]
        )
        if "under_pause" not in fields:
            fields.setdefault("pause", pb.PauseAround(mode=mode))
        request: pb.UpdateWeightsRequest = self.of(pb.UpdateWeightsRequest, **fields)
        return request

    def reconfigure(self, **fields: Any) -> pb.ReconfigureServingRequest:
        fields.setdefault("drain", self._drain_rule())
        request: pb.ReconfigureServingRequest = self.of(pb.ReconfigureServingRequest, **fields)
        return request

    def start_profile(self, **fields: Any) -> pb.StartProfileRequest:
        kinds = self._profile.profiler_kinds
        fields.setdefault("kind", kinds[0] if kinds else pb.PROFILER_KIND_TORCH)
        if "steps" not in fields:
            fields.setdefault("duration_ms", 60_000)
        request: pb.StartProfileRequest = self.of(pb.StartProfileRequest, **fields)
        return request

    def stop_profile(self, profile_id: str, **fields: Any) -> pb.StopProfileRequest:
        request: pb.StopProfileRequest = self.of(
            pb.StopProfileRequest, profile_id=profile_id, **fields
        )
        return request

    def whole(self, kind: Kind) -> Any:
        """A well-formed order of any kind, whether the engine offers it or not."""
        match kind:
            case pb.ADMIN_OPERATION_KIND_FLUSH_CACHES:
                return self.flush(caches=[pb.CACHE_KIND_PREFIX])
            case pb.ADMIN_OPERATION_KIND_PAUSE:
                return self.pause(pb.PAUSE_MODE_DRAIN)
            case pb.ADMIN_OPERATION_KIND_RESUME:
                return self.resume(max(1, self._profile.pause_epoch))
            case pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES:
                return self.of(
                    pb.ReleaseResourcesRequest,
                    resources=[pb.RESOURCE_KIND_KV_CACHE],
                    content=pb.CONTENT_POLICY_DISCARD,
                    drain=pb.DRAIN_RULE_WAIT,
                )
            case pb.ADMIN_OPERATION_KIND_RESTORE_RESOURCES:
                epoch = max(1, self._profile.release_epoch)
                return self.restore(epoch, resources=[pb.RESOURCE_KIND_KV_CACHE])
            case pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS:
                return self.update("/nowhere")
            case pb.ADMIN_OPERATION_KIND_PROFILE:
                return self.start_profile(duration_ms=1_000)
            case _:
                return self.reconfigure(max_running_requests=1)

    def _drain_rule(self) -> Any:
        return (*self._profile.drain_rules, pb.DRAIN_RULE_WAIT)[0]
