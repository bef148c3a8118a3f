"""Wrong about releases, updates, profiles and reconfiguration."""

from __future__ import annotations

from typing import Any

from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.conformance.whole_engine import WEIGHTS, WholeEngine


class ReleaseKeepsServing(WholeEngine):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        return answer if method == "Check" else super().answered(method, request, answer)


class ReleaseOfOneRank(WholeEngine):
    def _ReleaseResources(self, request: pb.ReleaseResourcesRequest) -> list[Any]:  # noqa: N802
        events = super()._ReleaseResources(request)
        del events[-1].completed.release_resources.memory[1:]
        return events


class ReleasesAgain(WholeEngine):
    def _ReleaseResources(self, request: pb.ReleaseResourcesRequest) -> list[Any]:  # noqa: N802
        self.released = []
        return super()._ReleaseResources(request)


class RestoresAnyEpoch(WholeEngine):
    def _RestoreResources(self, request: pb.RestoreResourcesRequest) -> list[Any]:  # noqa: N802
        if request.release_epoch:
            request.release_epoch = self.release_epoch
        return super()._RestoreResources(request)


class ResumesWhileReleased(WholeEngine):
    def _resume(self, request: Any) -> list[Any] | None:
        self.closed = False
        return self._completed("Resume", request, changed=True)


class RestoreLosesContent(WholeEngine):
    def _RestoreResources(self, request: pb.RestoreResourcesRequest) -> list[Any]:  # noqa: N802
        if pb.RESOURCE_KIND_WEIGHTS in request.resources:
            self.engine.accent = "ish"
        return super()._RestoreResources(request)


class NotAtomic(WholeEngine):
    """An update that fails leaves the new version behind."""

    def _UpdateWeights(self, request: pb.UpdateWeightsRequest) -> list[Any]:  # noqa: N802
        events = super()._UpdateWeights(request)
        self.version = request.weight_version
        return events


class ReadsAnyPath(WholeEngine):
    def _UpdateWeights(self, request: pb.UpdateWeightsRequest) -> list[Any]:  # noqa: N802
        if request.disk.path:
            request.disk.path = WEIGHTS
        return super()._UpdateWeights(request)


class IgnoresDigests(WholeEngine):
    def _UpdateWeights(self, request: pb.UpdateWeightsRequest) -> list[Any]:  # noqa: N802
        del request.disk.digests[:]
        return super()._UpdateWeights(request)


class EvidenceOfOneRank(WholeEngine):
    def _UpdateWeights(self, request: pb.UpdateWeightsRequest) -> list[Any]:  # noqa: N802
        events = super()._UpdateWeights(request)
        del events[-1].completed.update_weights.evidence[1:]
        return events


class ProfileOfOneRank(WholeEngine):
    def _StopProfile(self, request: pb.StopProfileRequest) -> list[Any]:  # noqa: N802
        answer = super()._StopProfile(request)
        ended = self._operations[self.profile.operation_id]
        del ended.completed.profile.artifacts[1:]
        return answer


class ManyProfiles(WholeEngine):
    def _StartProfile(self, request: pb.StartProfileRequest) -> list[Any]:  # noqa: N802
        self.running = None
        return super()._StartProfile(request)


class ProfilesAgain(WholeEngine):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "StartProfile":
            self._requests.pop(request.idempotency_key, None)
        return await super().instead(method, request)


class StopsAnyProfile(WholeEngine):
    def _StopProfile(self, request: pb.StopProfileRequest) -> list[Any]:  # noqa: N802
        return [pb.StopProfileResponse(state=pb.PROFILE_STATE_READY)]


class ReconfiguresAlways(WholeEngine):
    def _ReconfigureServing(self, request: pb.ReconfigureServingRequest) -> list[Any]:  # noqa: N802
        events = super()._ReconfigureServing(request)
        events[-1].completed.changed = True
        return events


class IgnoresLimit(WholeEngine):
    def _ReconfigureServing(self, request: pb.ReconfigureServingRequest) -> list[Any]:  # noqa: N802
        events = super()._ReconfigureServing(request)
        events[-1].completed.reconfigure_serving.max_running_requests = 32
        return events
