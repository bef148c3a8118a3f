"""Wrong about what a release does to admission and requests, and about whom a listener serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lifecycle_pb2, lora_pb2
from tests.conformance.faulty import Event, Fault, Forged, kind_of

WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION


class RestoreReopens(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if method == "RestoreResources" and kind_of(event) == "completed":
            self.state.resumed(None)
        return (event,)


class RemembersTheLastRelease(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            del answer.state.released[:-1]
        return answer


class _OtherRule(Fault):
    rules: tuple[Any, Any]

    async def asked(self, method: str, request: Any) -> Any:
        if method == "ReleaseResources" and request.drain == self.rules[0]:
            request.drain = self.rules[1]
        return request


class ReleaseEndsRequests(_OtherRule):
    rules = (pb.DRAIN_RULE_WAIT, pb.DRAIN_RULE_ABORT)


class ReleaseWaitsForRequests(_OtherRule):
    rules = (pb.DRAIN_RULE_ABORT, pb.DRAIN_RULE_WAIT)


class ReleaseTakesAnyway(_OtherRule):
    rules = (pb.DRAIN_RULE_REFUSE, pb.DRAIN_RULE_ABORT)


class DiscardsWhatIsFrozen(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method != "ReleaseResources" or status.code is not WRONG_STATE:
            await super().refuse(method, request, context, status)
        for event in self.forged(method):
            await context.write(event)


class ForgetsThatWeightsAreGone(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.state.weights.state = pb.WEIGHTS_STATE_VALID
        return answer


class EveryListenerIsAdmin(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if status.code is grpc.StatusCode.PERMISSION_DENIED:
            if method == "Abort":
                await self.engine.abort(None, "somebody said so")
                aborted = lifecycle_pb2.AbortStatus.ABORT_STATUS_ABORTED
                raise Forged(lifecycle_pb2.AbortResponse(status=aborted))
            raise Forged(lora_pb2.LoadLoraResponse())
        await super().refuse(method, request, context, status)


class ManyInstances(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetServerInfo":
            answer.instance_id += f"-{next(self._numbers)}"
        return answer
