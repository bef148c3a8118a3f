"""Wrong about releases, profiles and reconfiguration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import grpc

from app.domain.commands import ReconfigureServing, RestoreResources
from app.domain.kinds import ResourceKind
from app.enginekit.runtime import Conclusion, Order, ProfileArtifact, RankBytes
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.conformance.complete_engine import CompleteEngine
from tests.conformance.faulty import Event, Fault, Forged, Refusing, kind_of


class ReleaseOfOneRank(CompleteEngine):
    def _memory(
        self, kinds: tuple[ResourceKind, ...], *, given_back: bool
    ) -> tuple[RankBytes, ...]:
        return super()._memory(kinds, given_back=given_back)[: len(kinds)]


class RestoresAnyEpoch(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "RestoreResources" and request.release_epoch:
            request.release_epoch = self.state.journal.counters.release_epoch
        return request


class ResumesWhileReleased(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method != "Resume" or status.code is not grpc.StatusCode.FAILED_PRECONDITION:
            await super().refuse(method, request, context, status)
        for event in self.forged(method):
            await context.write(event)


class RestoreLosesContent(CompleteEngine):
    async def commit(self, order: Order, rank: int) -> None:
        await super().commit(order, rank)
        command = order.command
        if isinstance(command, RestoreResources) and ResourceKind.WEIGHTS in command.resources:
            self.accent = "ish"


class ProfileOfOneRank(CompleteEngine):
    async def finish_profile(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        return (await super().finish_profile(profile_id))[:1]


class ManyProfiles(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method == "StartProfile" and status.code is grpc.StatusCode.FAILED_PRECONDITION:
            raise Forged(pb.StartProfileResponse(profile_id="one-more"))
        await super().refuse(method, request, context, status)


class RecordsOn(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "StartProfile":
            request.ClearField("duration_ms")
        return request


class StopsAnyProfile(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method == "StopProfile" and status.code is grpc.StatusCode.NOT_FOUND:
            raise Forged(pb.StopProfileResponse(state=pb.PROFILE_STATE_READY))
        await super().refuse(method, request, context, status)


class IgnoresLimit(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "completed" and method == "ReconfigureServing":
            event.completed.reconfigure_serving.max_running_requests = 32
        return (event,)


class KeepsItsRole(CompleteEngine):
    """It says that it was reconfigured, and was not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stubborn = True


class OtherWeightsOnOtherRanks(CompleteEngine):
    def _reshaped(self, command: ReconfigureServing) -> Conclusion:
        concluded = super()._reshaped(command)
        if command.tensor_parallel_size:
            self.accent = f"of {command.tensor_parallel_size}"
        return concluded


class AnyShapeWillDo(CompleteEngine):
    """Takes what it cannot have, for as many ranks as it has."""

    def check_shape(self, command: ReconfigureServing) -> None:
        return

    def _reshaped(self, command: ReconfigureServing) -> Conclusion:
        ranks = min(command.tensor_parallel_size or len(self.ranks), 2)
        return super()._reshaped(replace(command, tensor_parallel_size=ranks))


class JoinsNobody(Fault):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "ReconfigureServing" and self.state.journal.open_operations():
            raise Refusing(grpc.StatusCode.ABORTED)
        return None


class IgnoresBatch(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "completed" and method == "ReconfigureServing":
            event.completed.reconfigure_serving.max_batched_tokens = 512
        return (event,)
