# ruff: noqa: N802 - the methods have the names of their RPCs
"""An engine that does as it is told, behind the real services on a real socket.

It is not a contract's double: it has just what the edge needs to be driven, and it counts every
call that reaches it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from app.rpc.openengine.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lifecycle_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

ORDERS = frozenset({"FlushCaches", "Pause", "Resume", "Abort", "CancelOperation"})

Event = admin_pb2.AdminOperationEvent
Context = grpc.aio.ServicerContext[Any, Any]


class ScriptedEngine:
    """`go` cleared: orders wait before they end. `answers` cleared: questions wait. `progress`: how
    many such events an order has."""

    def __init__(self) -> None:
        self.address = ""
        self.calls: Counter[str] = Counter()
        self.keys: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.progress = 0
        self.revision = 3
        self.pause_epoch = 0
        self.paused = False
        self.instance_id = "engine-life-1"
        self._events: dict[str, list[Event]] = {}
        self._cancelled: set[str] = set()

    @property
    def orders(self) -> int:
        """How many calls came that change something."""
        return sum(self.calls[name] for name in ORDERS)

    def profile(self) -> admin_pb2.AdminProfile:
        kinds = (
            admin_pb2.ADMIN_OPERATION_KIND_FLUSH_CACHES,
            admin_pb2.ADMIN_OPERATION_KIND_PAUSE,
            admin_pb2.ADMIN_OPERATION_KIND_RESUME,
            admin_pb2.ADMIN_OPERATION_KIND_ABORT_REQUESTS,
        )
        state = admin_pb2.AdminState(
            admission=admin_pb2.ADMISSION_STATE_PAUSED
            if self.paused
            else admin_pb2.ADMISSION_STATE_OPEN,
            weights=admin_pb2.WeightsStatus(version="v1", state=admin_pb2.WEIGHTS_STATE_VALID),
            role=server_pb2.ENGINE_ROLE_AGGREGATED,
        )
        if self.paused:
            state.pause.mode = admin_pb2.PAUSE_MODE_DRAIN
            state.pause.epoch = self.pause_epoch
        return admin_pb2.AdminProfile(
            operations=[
                admin_pb2.OperationSupport(
                    kind=kind, cancellable=kind == admin_pb2.ADMIN_OPERATION_KIND_PAUSE
                )
                for kind in kinds
            ],
            cache_kinds=[admin_pb2.CACHE_KIND_PREFIX],
            pause_modes=[admin_pb2.PAUSE_MODE_DRAIN, admin_pb2.PAUSE_MODE_ABORT],
            new_requests=[admin_pb2.NEW_REQUESTS_HOLD, admin_pb2.NEW_REQUESTS_REFUSE],
            models=["tiny"],
            world_size=1,
            instance_id=self.instance_id,
            revision=self.revision,
            revision_source=admin_pb2.REVISION_SOURCE_ENGINE,
            pause_epoch=self.pause_epoch,
            state=state,
        )

    async def carry_out(
        self, key: str, kind: int, finish: Callable[[admin_pb2.OperationCompleted], None]
    ) -> AsyncIterator[Event]:
        """Replays what it has said for the key, and goes on from there."""
        told = self._events.setdefault(key, [])

        def say(**what: Any) -> Event:
            event = Event(
                operation_id=f"at-engine-{key}",
                sequence=len(told) + 1,
                time_unix_nanos=time.time_ns(),
                **what,
            )
            told.append(event)
            return event

        for event in list(told):
            yield event
        if not told:
            self.keys.append(key)
            accepted = admin_pb2.OperationAccepted(
                kind=kind,  # type: ignore[arg-type]
                instance_id=self.instance_id,
                revision=self.revision,
            )
            yield say(accepted=accepted)
            for number in range(self.progress):
                yield say(
                    progress=admin_pb2.OperationProgress(
                        phase="draining", done=number, total=self.progress, unit="requests"
                    )
                )
        while not self.go.is_set() and key not in self._cancelled:  # noqa: ASYNC110 - or either
            await asyncio.sleep(0.01)
        if told[-1].WhichOneof("event") in ("completed", "cancelled"):
            return
        if key in self._cancelled:
            yield say(cancelled=admin_pb2.OperationCancelled(message="as asked"))
            return
        self.revision += 1
        completed = admin_pb2.OperationCompleted(
            changed=True, verification=admin_pb2.VERIFICATION_VERIFIED
        )
        finish(completed)
        completed.revision = self.revision
        yield say(completed=completed)

    def adopt(self, earlier: ScriptedEngine) -> None:
        """Be the same engine at another address."""
        self.instance_id, self.revision = earlier.instance_id, earlier.revision
        self.pause_epoch, self.paused = earlier.pause_epoch, earlier.paused
        self.keys = earlier.keys
        self._events = earlier._events

    def told(self, key: str) -> list[Event]:
        return self._events.get(key, [])

    def cancel(self, operation_id: str) -> None:
        self._cancelled.add(operation_id.removeprefix("at-engine-"))


class _Admin(admin_pb2_grpc.OpenEngineAdminServicer):
    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def GetAdminProfile(self, request: Any, context: Any) -> admin_pb2.AdminProfile:
        await self._engine.answers.wait()
        return self._engine.profile()

    async def GetOperation(self, request: Any, context: Any) -> admin_pb2.AdminOperation:
        told = self._engine.told(request.idempotency_key)
        if not told:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such operation")
        operation = admin_pb2.AdminOperation(
            operation_id=told[-1].operation_id,
            idempotency_key=request.idempotency_key,
            kind=told[0].accepted.kind,
            state=admin_pb2.ADMIN_OPERATION_STATE_RUNNING,
            instance_id=self._engine.instance_id,
            last_sequence=told[-1].sequence,
        )
        if told[-1].HasField("completed"):
            operation.state = admin_pb2.ADMIN_OPERATION_STATE_SUCCEEDED
            operation.completed.CopyFrom(told[-1].completed)
        return operation

    async def CancelOperation(
        self, request: Any, context: Any
    ) -> admin_pb2.CancelAdminOperationResponse:
        self._engine.cancel(request.operation_id)
        return admin_pb2.CancelAdminOperationResponse()

    async def FlushCaches(self, request: Any, context: Any) -> AsyncIterator[Event]:
        kind = admin_pb2.ADMIN_OPERATION_KIND_FLUSH_CACHES

        def finish(completed: admin_pb2.OperationCompleted) -> None:
            completed.flush_caches.SetInParent()

        async for event in self._engine.carry_out(request.idempotency_key, kind, finish):
            yield event

    async def Pause(self, request: Any, context: Any) -> AsyncIterator[Event]:
        def finish(completed: admin_pb2.OperationCompleted) -> None:
            self._engine.pause_epoch += 1
            self._engine.paused = True
            completed.pause.pause_epoch = self._engine.pause_epoch

        kind = admin_pb2.ADMIN_OPERATION_KIND_PAUSE
        async for event in self._engine.carry_out(request.idempotency_key, kind, finish):
            yield event

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[Event]:
        def finish(completed: admin_pb2.OperationCompleted) -> None:
            self._engine.paused = False
            completed.resume.pause_epoch = self._engine.pause_epoch

        kind = admin_pb2.ADMIN_OPERATION_KIND_RESUME
        async for event in self._engine.carry_out(request.idempotency_key, kind, finish):
            yield event


class _Control(openengine_pb2_grpc.ControlServicer):
    async def GetServerInfo(self, request: Any, context: Any) -> server_pb2.ServerInfo:
        return server_pb2.ServerInfo()

    async def GetLoad(self, request: Any, context: Any) -> server_pb2.LoadInfo:
        return server_pb2.LoadInfo(running_requests=2, queued_requests=0)

    async def Abort(self, request: Any, context: Any) -> lifecycle_pb2.AbortResponse:
        return lifecycle_pb2.AbortResponse()


class _Counting(grpc.aio.ServerInterceptor):
    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        self._calls[str(handler_call_details.method).rpartition("/")[2]] += 1
        return await continuation(handler_call_details)


@asynccontextmanager
async def scripted_engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    server = grpc.aio.server(interceptors=[_Counting(engine.calls)])
    admin_pb2_grpc.add_OpenEngineAdminServicer_to_server(_Admin(engine), server)  # type: ignore[abstract]
    openengine_pb2_grpc.add_ControlServicer_to_server(_Control(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    engine.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield engine
    finally:
        engine.go.set()
        await server.stop(0.2)
