"""One fault between an engine and its clients: what they ask, hear, or are refused with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import count
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from app.enginekit.state import EngineState
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.conformance.paced_engine import PacedEngine
from tests.doubles.engine import EngineDouble

Event = pb.AdminOperationEvent
TERMINAL = ("completed", "failed", "cancelled")
_KINDS = {
    "FlushCaches": pb.ADMIN_OPERATION_KIND_FLUSH_CACHES,
    "Pause": pb.ADMIN_OPERATION_KIND_PAUSE,
    "Resume": pb.ADMIN_OPERATION_KIND_RESUME,
    "ReleaseResources": pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES,
    "RestoreResources": pb.ADMIN_OPERATION_KIND_RESTORE_RESOURCES,
    "UpdateWeights": pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS,
    "ReconfigureServing": pb.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING,
}


def kind_of(event: Event) -> str:
    return event.WhichOneof("event") or ""


class Fault(grpc.aio.ServerInterceptor):
    """An engine without a fault; each wrong one overrides a little. `engine` is the runtime of the
    present life. Requests and messages may be changed in place."""

    def __init__(self) -> None:
        self.double: EngineDouble | None = None
        self._numbers = count(1)

    @property
    def engine(self) -> PacedEngine:
        assert self.double is not None
        assert isinstance(self.double.engine, PacedEngine)
        return self.double.engine

    @property
    def state(self) -> EngineState:
        assert self.double is not None
        return self.double.server._running().state

    # ---- what a fault changes ----

    async def asked(self, method: str, request: Any) -> Any:
        """What the engine gets instead."""
        return request

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        """What the client gets instead of an event."""
        return (event,)

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        """What the client gets instead of a unary answer."""
        return answer

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        """Messages with which to answer without asking the engine."""
        return None

    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        """The engine refuses; does not return when the client is refused too."""
        await context.abort_with_status(status)

    async def closing(self, method: str, context: Any) -> None:
        """The stream of an accepted operation is about to end OK."""

    async def observer_gone(self, method: str, operation_id: str) -> None:
        """The client has broken off a stream."""

    # ---- the way through ----

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.rpartition("/")
        if handler is None or service.endswith("Inference"):
            return handler
        if handler.unary_stream is not None and "openengine" in service:
            return handler._replace(unary_stream=self._stream(method, handler.unary_stream))
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._unary(method, handler.unary_unary))
        return handler

    def _stream(self, method: str, inner: Any) -> Any:
        async def serve(request: Any, context: Any) -> None:
            between = _Between(context, self, method, request)
            forged = await self._own_answer(method, request, context)
            if forged is not None:
                for event in forged:
                    await context.write(event)
                return
            try:
                await inner(await self.asked(method, _copy(request)), between)
            except asyncio.CancelledError:
                if between.operation_id:
                    await self.observer_gone(method, between.operation_id)
                raise
            await self.closing(method, context)

        return serve

    def _unary(self, method: str, inner: Any) -> Any:
        async def serve(request: Any, context: Any) -> Any:
            forged = await self._own_answer(method, request, context)
            if forged is not None:
                return forged[0]
            between = _Between(context, self, method, request)
            try:
                answer = await inner(await self.asked(method, _copy(request)), between)
            except Forged as forged_answer:
                return forged_answer.message
            return self.answered(method, request, answer)

        return serve

    async def _own_answer(self, method: str, request: Any, context: Any) -> list[Any] | None:
        try:
            return await self.instead(method, request)
        except Refusing as refusing:
            info = any_pb2.Any()
            info.Pack(error_details_pb2.ErrorInfo(reason=refusing.code.name, domain="double"))
            number = refusing.code.value[0]
            status = status_pb2.Status(code=number, message="no", details=[info])
            await context.abort_with_status(rpc_status.to_status(status))
            raise AssertionError("abort does not return") from refusing

    # ---- lies ----

    def forged(self, method: str, revision: int = 1) -> list[Event]:
        """An operation that is accepted and completes, and of which the engine knows nothing."""
        operation_id = f"forged-{next(self._numbers)}"
        accepted = Event(operation_id=operation_id, sequence=1, time_unix_nanos=1)
        accepted.accepted.kind = _KINDS[method]
        accepted.accepted.instance_id = "forged"
        accepted.accepted.revision = revision
        ended = Event(operation_id=operation_id, sequence=2, time_unix_nanos=2)
        ended.completed.changed = True
        ended.completed.revision = revision
        return [accepted, ended]


class Forged(Exception):
    """Raised in `refuse` of a unary RPC: answer so instead."""

    def __init__(self, message: Any) -> None:
        super().__init__()
        self.message = message


class Refusing(Exception):
    """Raised in `instead`: refuse with that."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


class _Between:
    """The context as the engine sees it."""

    def __init__(self, context: Any, fault: Fault, method: str, request: Any) -> None:
        self._context = context
        self._fault = fault
        self._method = method
        self._request = request
        self.operation_id = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, event: Any) -> None:
        self.operation_id = getattr(event, "operation_id", "")
        for changed in self._fault.told(self._method, self._request, _copy(event)):
            await self._context.write(changed)

    async def abort_with_status(self, status: Any) -> None:
        await self._fault.refuse(self._method, self._request, self._context, status)


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


async def turned_down(context: Any, code: grpc.StatusCode) -> NoReturn:
    await context.abort(code, "no")
    raise AssertionError("abort does not return")
