"""`OpenEngineAdmin`: from messages to the desk and back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from app.domain.capabilities import Capabilities
from app.domain.errors import FieldFault, InvalidArgument
from app.enginekit.auth import Callers
from app.enginekit.desk import OrderDesk
from app.enginekit.group_calls import GroupCalls
from app.enginekit.profile import profile_message
from app.enginekit.profile_calls import ProfileCalls
from app.enginekit.refusals import answering
from app.enginekit.requests import OrderRequest, read_offered
from app.enginekit.state import EngineState
from app.enginekit.wire import event_message, operation_message
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc

# Streams are coroutines that write, not generators: a generator that grpc drops in the middle of a
# write ends only when it is collected. The generated types know generators alone.


class AdminService(admin_pb2_grpc.OpenEngineAdminServicer):
    def __init__(
        self,
        desk: OrderDesk,
        state: EngineState,
        callers: Callers,
        capabilities: Callable[[], Capabilities],
        groups: GroupCalls,
    ) -> None:
        self._desk = desk
        self._state = state
        self._callers = callers
        self._capabilities = capabilities
        self._profiles = ProfileCalls(desk, state, capabilities)
        self._groups = groups

    async def FlushCaches(  # type: ignore[override]
        self, request: admin_pb2.FlushCachesRequest, context: Any
    ) -> None:
        await self._order(request, context)

    async def Pause(  # type: ignore[override]
        self, request: admin_pb2.PauseRequest, context: Any
    ) -> None:
        await self._order(request, context)

    async def Resume(  # type: ignore[override]
        self, request: admin_pb2.ResumeRequest, context: Any
    ) -> None:
        await self._order(request, context)

    async def ReleaseResources(  # type: ignore[override]
        self, request: admin_pb2.ReleaseResourcesRequest, context: Any
    ) -> None:
        await self._order(request, context)

    async def RestoreResources(  # type: ignore[override]
        self, request: admin_pb2.RestoreResourcesRequest, context: Any
    ) -> None:
        await self._order(request, context)

    async def UpdateWeights(  # type: ignore[override]
        self, request: admin_pb2.UpdateWeightsRequest, context: Any
    ) -> None:
        await self._order(request, context)

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Any
    ) -> admin_pb2.StartProfileResponse:
        async with answering(context):
            return await self._profiles.start(request, self._callers.actor())

    async def StopProfile(
        self, request: admin_pb2.StopProfileRequest, context: Any
    ) -> admin_pb2.StopProfileResponse:
        async with answering(context):
            return await self._profiles.stop(request)

    async def ReconfigureServing(  # type: ignore[override]
        self, request: admin_pb2.ReconfigureServingRequest, context: Any
    ) -> None:
        await self._order(request, context)

    async def GetOperation(
        self, request: admin_pb2.GetAdminOperationRequest, context: Any
    ) -> admin_pb2.AdminOperation:
        async with answering(context):
            match request.WhichOneof("lookup"):
                case "operation_id" if request.operation_id:
                    found = await self._desk.find(operation_id=request.operation_id)
                case "idempotency_key" if request.idempotency_key:
                    found = await self._desk.find(key=request.idempotency_key)
                case _:
                    raise _missing("operation_id", "give an operation id or an idempotency key")
            return operation_message(found)

    async def CancelOperation(
        self, request: admin_pb2.CancelAdminOperationRequest, context: Any
    ) -> admin_pb2.CancelAdminOperationResponse:
        async with answering(context):
            if not request.operation_id:
                raise _missing("operation_id", "must be set")
            found = await self._desk.cancel(request.operation_id)
            return admin_pb2.CancelAdminOperationResponse(operation=operation_message(found))

    async def GetAdminProfile(
        self, request: admin_pb2.GetAdminProfileRequest, context: Any
    ) -> admin_pb2.AdminProfile:
        async with answering(context):
            await self._state.refresh()
            return profile_message(self._capabilities(), self._state)

    async def JoinGroup(
        self, request: admin_pb2.JoinGroupRequest, context: Any
    ) -> admin_pb2.JoinGroupResponse:
        async with answering(context):
            await self._groups.join(request)
            return admin_pb2.JoinGroupResponse()

    async def _order(self, request: OrderRequest, context: Any) -> None:
        async with answering(context):
            order = read_offered(request, self._capabilities())
            operation_id = await self._desk.submit(order, self._callers.actor())
            async with aclosing(self._desk.follow(operation_id)) as told:
                async for record, event in told:
                    await context.write(event_message(record, event))


def _missing(field: str, detail: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {detail}", faults=(FieldFault(f"/{field}", detail),))
