"""An engine that offers everything, as far as the cases look: the minimal one, and in front of it
a pretence of releases, updates, profiles and reconfiguration that keeps the contract's rules."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import grpc

from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import server_pb2
from tests.conformance.faulty import _KINDS, Event, Fault, Refusing, kind_of

WEIGHTS = "/models/next"
RANKS = (0, 1)
_INVALID, _UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
_WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION
_NOT_SERVING = 2
_ROLE = server_pb2.ENGINE_ROLE_AGGREGATED
_RESOURCES = {
    pb.RESOURCE_KIND_WEIGHTS: (pb.CONTENT_POLICY_PRESERVE,),
    pb.RESOURCE_KIND_KV_CACHE: (pb.CONTENT_POLICY_DISCARD,),
}


def _one_of(number: int, known: Iterable[int], offered: Iterable[int]) -> None:
    if number not in known or number == 0:
        raise Refusing(_INVALID)
    if number not in offered:
        raise Refusing(_UNIMPLEMENTED)


class WholeEngine(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._rises = 0  # of the revision, beside the kit's own
        self._at: dict[str, int] = {}
        self._events: dict[str, list[Event]] = {}
        self._requests: dict[str, Any] = {}
        self._operations: dict[str, pb.AdminOperation] = {}
        self._ids = count(1)
        self.released: list[pb.ResourceKind.ValueType] = []
        self.closed = False
        self.release_epoch = 0
        self.version = "v1"
        self.limit = 32
        self.running: pb.StartProfileRequest | None = None
        self.profile = pb.StartProfileResponse()

    # ---- orders ----

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "GetOperation":
            found = self._operations.get(request.operation_id)
            return None if found is None else [found]
        if method == "Resume" and (self.released or self.closed):
            return self._resume(request)
        own = getattr(self, f"_{method}", None)
        if own is None:
            return None
        if not 0 < len(request.idempotency_key) <= 128 or not request.idempotency_key.isascii():
            raise Refusing(_INVALID)
        earlier = self._requests.get(request.idempotency_key)
        if earlier is not None and earlier != request:
            raise Refusing(grpc.StatusCode.ALREADY_EXISTS)
        if earlier is None:
            answer = own(request)
            self._requests[request.idempotency_key] = request
            self._events[request.idempotency_key] = answer
        return self._events[request.idempotency_key]

    def _resume(self, request: Any) -> list[Any] | None:
        if self.released:
            raise Refusing(_WRONG_STATE)
        self.closed = False
        if self._state().gate.admission == "paused":
            return None
        return self._completed("Resume", request, changed=True)

    def _completed(self, method: str, request: Any, *, changed: bool, **result: Any) -> list[Any]:
        before = self._state().journal.counters.revision + self._rises
        self._rises += changed
        accepted, ended = self.forged(method, before)
        accepted.accepted.instance_id = self._state().instance_id
        ended.completed.CopyFrom(
            pb.OperationCompleted(changed=changed, revision=before + changed, **result)
        )
        return [accepted, ended]

    def _ReleaseResources(self, request: pb.ReleaseResourcesRequest) -> list[Any]:  # noqa: N802
        if not request.resources:
            raise Refusing(_INVALID)
        for kind in request.resources:
            _one_of(kind, pb.ResourceKind.values(), _RESOURCES)
            _one_of(request.content, pb.ContentPolicy.values(), _RESOURCES[kind])
        _one_of(request.drain, pb.DrainRule.values(), (pb.DRAIN_RULE_WAIT,))
        changed = not set(request.resources) <= set(self.released)
        self.release_epoch += changed
        self.closed = True
        self.released = sorted({*self.released, *request.resources})
        result = pb.ReleaseResourcesResult(
            release_epoch=self.release_epoch,
            released=self.released,
            memory=[
                pb.RankBytes(rank=rank, resource=kind, bytes_before=10)
                for rank in RANKS
                for kind in request.resources
            ],
        )
        return self._completed(
            "ReleaseResources", request, changed=changed, release_resources=result
        )

    def _RestoreResources(self, request: pb.RestoreResourcesRequest) -> list[Any]:  # noqa: N802
        if not request.resources or not request.release_epoch:
            raise Refusing(_INVALID)
        for kind in request.resources:
            _one_of(kind, pb.ResourceKind.values(), _RESOURCES)
        if request.release_epoch != self.release_epoch:
            raise Refusing(_WRONG_STATE)
        self.released = [kind for kind in self.released if kind not in request.resources]
        result = pb.RestoreResourcesResult(release_epoch=self.release_epoch, released=self.released)
        return self._completed("RestoreResources", request, changed=True, restore_resources=result)

    def _UpdateWeights(self, request: pb.UpdateWeightsRequest) -> list[Any]:  # noqa: N802
        _one_of(request.cache_policy, pb.CachePolicy.values(), (pb.CACHE_POLICY_FLUSH,))
        if not request.components or not request.disk.path or not request.HasField("pause"):
            raise Refusing(_INVALID)
        for component in request.components:
            _one_of(component, pb.Component.values(), (pb.COMPONENT_TARGET,))
        _one_of(request.pause.mode, pb.PauseMode.values(), pb.PauseMode.values())
        if request.disk.path != WEIGHTS or request.disk.digests:
            accepted, ended = self.forged("UpdateWeights")
            ended.failed.reason = "WEIGHTS_NOT_FOUND"
            ended.failed.effect = pb.FAILURE_EFFECT_NONE
            return [accepted, ended]
        result = pb.UpdateWeightsResult(
            weight_version=request.weight_version,
            previous_weight_version=self.version,
            evidence=[
                pb.RankEvidence(rank=rank, tensors=1, bytes=4, sha256=bytes(32)) for rank in RANKS
            ],
        )
        self.version = request.weight_version
        return self._completed("UpdateWeights", request, changed=True, update_weights=result)

    def _ReconfigureServing(self, request: pb.ReconfigureServingRequest) -> list[Any]:  # noqa: N802
        said = {field.name for field, _ in request.ListFields()}
        fields = ("role", "tensor_parallel_size", "data_parallel_size", "max_batched_tokens")
        given = [name for name in fields if name in said]
        if not given and not request.HasField("max_running_requests"):
            raise Refusing(_INVALID)
        _one_of(request.drain, pb.DrainRule.values(), (pb.DRAIN_RULE_WAIT,))
        if request.HasField("role"):
            _one_of(
                request.role, server_pb2.EngineRole.values(), (server_pb2.ENGINE_ROLE_AGGREGATED,)
            )
            given.remove("role")
        if given:
            raise Refusing(_UNIMPLEMENTED)
        wanted = request.max_running_requests or self.limit
        changed, self.limit = wanted != self.limit, wanted
        result = pb.ReconfigureServingResult(role=_ROLE, max_running_requests=wanted)
        return self._completed(
            "ReconfigureServing", request, changed=changed, reconfigure_serving=result
        )

    def _StartProfile(self, request: pb.StartProfileRequest) -> list[Any]:  # noqa: N802
        _one_of(request.kind, pb.ProfilerKind.values(), (pb.PROFILER_KIND_TORCH,))
        if request.WhichOneof("bound") is None:
            raise Refusing(_INVALID)
        if self.running is not None:
            if request.duration_ms != self.running.duration_ms:
                raise Refusing(_WRONG_STATE)
            again = pb.StartProfileResponse()
            again.CopyFrom(self.profile)
            again.already_running = True
            return [again]
        name = f"profile-{next(self._ids)}"
        self.running = request
        self.profile = pb.StartProfileResponse(
            operation_id=f"operation-of-{name}", profile_id=name, state=pb.PROFILE_STATE_RUNNING
        )
        return [self.profile]

    def _StopProfile(self, request: pb.StopProfileRequest) -> list[Any]:  # noqa: N802
        if not request.profile_id:
            raise Refusing(_INVALID)
        if self.running is None or request.profile_id != self.profile.profile_id:
            raise Refusing(grpc.StatusCode.NOT_FOUND)
        self.running = None
        ended = pb.AdminOperation(operation_id=self.profile.operation_id)
        for rank in RANKS:
            ended.completed.profile.artifacts.add(
                rank=rank, path=f"rank{rank}.json", size_bytes=1, sha256=bytes(32)
            )
        self._operations[ended.operation_id] = ended
        return [
            pb.StopProfileResponse(
                operation_id=ended.operation_id,
                profile_id=request.profile_id,
                state=pb.PROFILE_STATE_EXPORTING,
            )
        ]

    # ---- the kit's own orders, and the profile ----

    def _state(self) -> Any:
        assert self.double is not None
        return self.double.server._running().state

    async def asked(self, method: str, request: Any) -> Any:
        if getattr(request, "expected_revision", 0):
            request.expected_revision -= min(self._rises, request.expected_revision)
        return request

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        rises = self._at.setdefault(event.operation_id, self._rises)
        if kind_of(event) in ("accepted", "completed"):
            getattr(event, kind_of(event)).revision += rises
        return (event,)

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            self._tell(answer)
        if method == "GetOperation" and answer.HasField("completed"):
            answer.completed.revision += self._at.get(answer.operation_id, 0)
        if method == "Check" and request.service.endswith("Inference") and self.closed:
            answer.status = _NOT_SERVING
        return answer

    def _tell(self, profile: pb.AdminProfile) -> None:
        offered = {support.kind for support in profile.operations}
        wanted = {*_KINDS.values(), pb.ADMIN_OPERATION_KIND_PROFILE} - offered
        for kind in sorted(wanted):
            profile.operations.add(kind=kind)
        for resource, content in _RESOURCES.items():
            profile.resources.add(kind=resource, content=content)
        profile.drain_rules.append(pb.DRAIN_RULE_WAIT)
        profile.weight_sources.append(pb.WEIGHT_SOURCE_KIND_DISK)
        profile.cache_policies.append(pb.CACHE_POLICY_FLUSH)
        profile.components.append(pb.COMPONENT_TARGET)
        profile.profiler_kinds.append(pb.PROFILER_KIND_TORCH)
        profile.reconfigurable.extend(
            [pb.RECONFIGURABLE_FIELD_ROLE, pb.RECONFIGURABLE_FIELD_MAX_RUNNING_REQUESTS]
        )
        profile.revision += self._rises
        profile.release_epoch = self.release_epoch
        profile.state.released.extend(self.released)
        profile.state.weights.version = self.version
        if self.closed:
            profile.state.admission = pb.ADMISSION_STATE_PAUSED
        if self.running is not None:
            profile.state.profile.profile_id = self.profile.profile_id
