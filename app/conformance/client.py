"""One client of the engine's admin listener: calls with deadlines, all of it recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from app.conformance.case import NotHeld, expect
from app.conformance.connection import Listener, Metadata
from app.conformance.record import Event, Record, Refusal, Told, kind_of
from app.conformance.watching import HealthWatch
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc, openengine_pb2_grpc

UNARY = (
    admin_pb2.StartProfileRequest,
    admin_pb2.StopProfileRequest,
    admin_pb2.GetAdminOperationRequest,
    admin_pb2.CancelAdminOperationRequest,
    admin_pb2.GetAdminProfileRequest,
)
"""RPCs of OpenEngineAdmin that answer once; the others stream events."""


class Stream:
    """The events of one order, read a piece at a time. Nothing here raises for a refusal: it is
    found in `told.refusal`."""

    def __init__(self, method: str, call: Any, record: Record, patience_s: float) -> None:
        self._call = call
        self._record = record
        self._patience_s = patience_s
        self.told = Told(method)
        record.told.append(self.told)

    @property
    def events(self) -> list[Event]:
        return self.told.events

    async def next(self) -> Event | None:
        """None: the stream is over. Raises NotHeld when nothing comes for too long."""
        if self.told.ended or self.told.detached or self.told.refusal is not None:
            return None
        try:
            async with asyncio.timeout(self._patience_s):
                event: Any = await self._call.read()
        except TimeoutError:
            self.detach()
            raise NotHeld(
                f"the stream of {self.told.method} to go on or to end within "
                f"{self._patience_s:g} s",
                str(self.told),
            ) from None
        except grpc.aio.AioRpcError as error:
            self.told.refusal = self._record.refused(self.told.method, error)
            return None
        if not isinstance(event, Event):
            self.told.ended = True
            return None
        self._record.heard(f"event of {self.told.method}", event)
        self.told.events.append(event)
        return event

    async def first(self) -> Event:
        """Raises NotHeld for a refusal."""
        event = self.events[0] if self.events else await self.next()
        expect(event is not None, f"{self.told.method} to be accepted", self.told)
        assert event is not None
        return event

    async def rest(self) -> Told:
        while await self.next() is not None:
            pass
        return self.told

    def detach(self) -> None:
        self.told.detached = not self.told.ended
        self._call.cancel()


class Client:
    """`name` is for reports. Calls raise grpc.aio.AioRpcError where they do not say otherwise."""

    def __init__(self, listener: Listener, record: Record, patience_s: float) -> None:
        self._listener = listener
        self._record = record
        self._patience_s = patience_s
        self.channel = listener.channel()
        self._admin: Any = admin_pb2_grpc.OpenEngineAdminStub(self.channel)
        self.control: Any = openengine_pb2_grpc.ControlStub(self.channel)
        self._health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()

    # ---- orders ----

    def send(
        self, request: Any, *, timeout_s: float | None = None, metadata: Metadata | None = None
    ) -> Stream:
        """The RPC of the order is known from the type of the request."""
        method = request.DESCRIPTOR.name.removesuffix("Request")
        call = getattr(self._admin, method)(
            request,
            # Longer than the patience for one event: an order may have much to tell.
            timeout=timeout_s or 10 * self._patience_s,
            metadata=self._listener.metadata if metadata is None else metadata,
        )
        return Stream(method, call, self._record, self._patience_s)

    async def told(self, request: Any) -> Told:
        """To the end of the stream, whatever that is."""
        return await self.send(request).rest()

    async def completed(self, request: Any) -> admin_pb2.OperationCompleted:
        """Raises NotHeld for another end, and for a refusal."""
        return completed_of(await self.told(request))

    async def failed(self, request: Any) -> admin_pb2.OperationFailed:
        told = await self.told(request)
        expect(ends_with(told, "failed"), f"{told.method} to end failed", told)
        return told.events[-1].failed

    async def refused(self, request: Any, *codes: grpc.StatusCode) -> Refusal:
        """Of any RPC. Raises NotHeld when it is accepted, or refused otherwise."""
        wanted = " or ".join(code.name for code in codes)
        name = request.DESCRIPTOR.name.removesuffix("Request")
        if type(request) in UNARY:
            answer = await self.ask(request)
            if not isinstance(answer, Refusal) or answer.code not in codes:
                raise NotHeld(f"{name} to be refused with {wanted}", brief(answer))
            return answer
        told = await self.told(request)
        expect(
            told.refusal is not None and not told.events and told.refusal.code in codes,
            f"{name} to be refused with {wanted}",
            told,
        )
        assert told.refusal is not None
        return told.refusal

    # ---- unary ----

    async def unary(self, call: Awaitable[Any], method: str) -> Any:
        """The answer, or the Refusal."""
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            return self._record.refused(method, error)
        self._record.heard(f"answer of {method}", answer)
        return answer

    async def ask(self, request: Any, *, metadata: Metadata | None = None) -> Any:
        """A unary RPC of OpenEngineAdmin: the answer, or the Refusal."""
        named = request.DESCRIPTOR.name.removesuffix("Request")
        method = named.replace("AdminOperation", "Operation")
        call = getattr(self._admin, method)(
            request,
            timeout=self._patience_s,
            metadata=self._listener.metadata if metadata is None else metadata,
        )
        return await self.unary(call, method)

    async def answered(self, request: Any) -> Any:
        """Like `ask`; raises NotHeld for a refusal."""
        answer = await self.ask(request)
        if isinstance(answer, Refusal):
            raise NotHeld(f"{answer.method} to be answered", str(answer))
        return answer

    async def profile(self) -> admin_pb2.AdminProfile:
        answer = await self.answered(admin_pb2.GetAdminProfileRequest())
        assert isinstance(answer, admin_pb2.AdminProfile)
        return answer

    async def operation(self, **lookup: str) -> admin_pb2.AdminOperation:
        answer = await self.answered(admin_pb2.GetAdminOperationRequest(**lookup))
        assert isinstance(answer, admin_pb2.AdminOperation)
        return answer

    async def ended(self, operation_id: str) -> admin_pb2.AdminOperation:
        """The operation, once it has ended. Raises NotHeld when that takes too long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s
        while True:
            operation = await self.operation(operation_id=operation_id)
            if operation.WhichOneof("outcome") is not None:
                return operation
            if loop.time() > until:
                raise NotHeld(
                    f"the operation to end within {self._patience_s:g} s", brief(operation)
                )
            await asyncio.sleep(0.02)

    async def health(self, service: str) -> str:
        """SERVING, NOT_SERVING, …, or the name of the status that came instead."""
        call = self._health.Check(
            health_pb2.HealthCheckRequest(service=service),
            timeout=self._patience_s,
            metadata=self._listener.metadata,
        )
        answer = await self.unary(call, "Health.Check")
        if isinstance(answer, Refusal):
            return answer.code.name
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    @asynccontextmanager
    async def watching(self, service: str) -> AsyncGenerator[HealthWatch]:
        call = self._health.Watch(
            health_pb2.HealthCheckRequest(service=service),
            timeout=10 * self._patience_s,
            metadata=self._listener.metadata,
        )
        try:
            yield HealthWatch(call, self._patience_s)
        finally:
            call.cancel()

    async def of_control(
        self, method: str, request: Any, *, metadata: Metadata | None = None
    ) -> Any:
        """A unary RPC of the core Control service: the answer, or the Refusal."""
        call = getattr(self.control, method)(
            request,
            timeout=self._patience_s,
            metadata=self._listener.metadata if metadata is None else metadata,
        )
        return await self.unary(call, method)

    def stream_of_control(self, method: str, request: Any) -> Any:
        """The call of an RPC of Control that streams."""
        return getattr(self.control, method)(
            request, timeout=10 * self._patience_s, metadata=self._listener.metadata
        )


def completed_of(told: Told) -> admin_pb2.OperationCompleted:
    expect(ends_with(told, "completed"), f"{told.method} to complete", described(told))
    return told.events[-1].completed


def ends_with(told: Told, kind: str) -> bool:
    return bool(told.events) and kind_of(told.events[-1]) == kind


def described(told: Told) -> str:
    """With the reason of a failure."""
    if ends_with(told, "failed"):
        failed = told.events[-1].failed
        return f"{told}: {failed.reason}, {failed.message}"
    return str(told)


def brief(message: Any) -> str:
    """One line, cut short."""
    line = " ".join(str(message).split())
    return line if len(line) < 240 else f"{line[:237]}..."
