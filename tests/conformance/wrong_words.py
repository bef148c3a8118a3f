"""Wrong about what is told, how health is told, and what is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.conformance.faulty import TERMINAL, Event, Fault, Refusing, kind_of

_KEPT = 2


class ReplaysAtOtherTimes(Fault):
    """Whoever hears an event later hears another time of it."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: dict[tuple[str, int], int] = {}

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        key = event.operation_id, event.sequence
        again = self._heard[key] = self._heard.get(key, -1) + 1
        if event.sequence > 1 and kind_of(event) not in TERMINAL:
            event.time_unix_nanos += again
        return (event,)


class RanksThatAreNot(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "rank":
            event.rank.rank += 7
        return (event,)


class BeyondTheTotal(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) in ("progress", "rank"):
            event.progress.total, event.progress.done = 3, 4
        return (event,)


class ResultOfNoKind(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        event.completed.ClearField("pause") if kind_of(event) == "completed" else None
        return (event,)


class FailsWithoutAReason(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "failed":
            event.failed.reason = ""
        return (event,)


class LeavesTheEffectOpen(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "failed":
            event.failed.effect = pb.FAILURE_EFFECT_UNSPECIFIED
        return (event,)


class AllIsInternal(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        told = status_pb2.Status.FromString(
            dict(status.trailing_metadata)["grpc-status-details-bin"]
        )
        told.code = grpc.StatusCode.INTERNAL.value[0]
        await context.abort_with_status(rpc_status.to_status(told))


class KeepsFew(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._ended: list[str] = []

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) in TERMINAL and event.operation_id not in self._ended:
            self._ended.append(event.operation_id)
        return (event,)

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "GetOperation" and request.operation_id in self._ended[:-_KEPT]:
            raise Refusing(grpc.StatusCode.NOT_FOUND)
        return None


class KnowsNoModel(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if getattr(request, "model", ""):
            request.model += "-of-another-engine"
        return request


class ProfilesAlone(Fault):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "StartProfile" and self.state.journal.open_operations():
            raise Refusing(grpc.StatusCode.FAILED_PRECONDITION)
        return None


class TakesSessions(Fault):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "UpdateWeights" and request.HasField("session"):
            return list(self.forged(method))
        return None


class UnspecifiedIsTheDefault(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "UpdateWeights" and not request.pause.new_requests:
            request.pause.ClearField("new_requests")
            request.disk.path = request.disk.path or "/nowhere"
        return request


class TellsHealthOnce(Fault):
    """Whoever watches hears how it was at the beginning."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if not handler_call_details.method.endswith("/Watch"):
            return handler
        return handler._replace(unary_stream=_first_of(handler.unary_stream))


def _first_of(inner: Any) -> Any:
    async def serve(request: Any, context: Any) -> None:
        await inner(request, _Once(context))

    return serve


class _Once:
    def __init__(self, context: Any) -> None:
        self._context = context
        self._told = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        if not self._told:
            self._told = True
            await self._context.write(message)


class NeverMixed(Fault):
    """Whatever became of an update, its version is said to be there, and valid."""

    def __init__(self) -> None:
        super().__init__()
        self._version = ""

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if method == "UpdateWeights" and kind_of(event) == "failed":
            self._version = request.weight_version
        return (event,)

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile" and self._version:
            answer.state.weights.version = self._version
            answer.state.weights.state = pb.WEIGHTS_STATE_VALID
        return answer


class FailureTellsNoRevision(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "failed":
            event.failed.revision = 0
        return (event,)


class RepeatsOnTheRanks(Fault):
    """Tells the ranks again what they have done."""

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "completed" and not event.completed.changed:
            more = Event(operation_id=event.operation_id, sequence=event.sequence)
            more.rank.state = pb.RANK_STATE_COMMITTED
            event.sequence += 1
            return (more, event)
        return (event,)


class TriesAgain(Fault):
    """A key stands for an order until that has failed."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: set[str] = set()

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "failed":
            self._failed.add(request.idempotency_key)
        return (event,)

    async def asked(self, method: str, request: Any) -> Any:
        if getattr(request, "idempotency_key", "") in self._failed:
            request.idempotency_key += "-again"
        return request
