"""StartProfile and StopProfile: unary calls that steer one operation."""

from __future__ import annotations

from collections.abc import Callable

from app.domain.capabilities import Capabilities
from app.domain.commands import check_revision
from app.domain.errors import UnknownOperation, UnknownProfile, UnsupportedOperation
from app.domain.idempotency import KeyRecord, replay_of
from app.domain.kinds import OperationKind, OperationState, ProfileState
from app.domain.operation import Actor
from app.enginekit.desk import OrderDesk
from app.enginekit.refusals import OrderDidNotSucceed
from app.enginekit.requests import fingerprint, read_offered, read_stop
from app.enginekit.state import EngineState
from app.enginekit.vocabulary import PROFILE_STATE
from app.rpc.openengine.v1 import admin_pb2


class ProfileCalls:
    def __init__(
        self, desk: OrderDesk, state: EngineState, capabilities: Callable[[], Capabilities]
    ) -> None:
        self._desk = desk
        self._state = state
        self._capabilities = capabilities

    async def start(
        self, request: admin_pb2.StartProfileRequest, actor: Actor
    ) -> admin_pb2.StartProfileResponse:
        """Answers once it records. The same kind and bounds as the running one: that one."""
        order = read_offered(request, self._capabilities())
        operation_id = await self._desk.submit(order, actor)
        run = self._desk.profile_run(operation_id)
        if run is not None:
            await run.beyond(None)
        record = await self._desk.find(operation_id=operation_id)
        if run is not None and not run.began:
            raise OrderDidNotSucceed(record.operation)
        return admin_pb2.StartProfileResponse(
            operation_id=operation_id,
            profile_id=operation_id,
            state=PROFILE_STATE.number(await self._reached(operation_id)),
            already_running=record.key != order.key,
        )

    async def stop(self, request: admin_pb2.StopProfileRequest) -> admin_pb2.StopProfileResponse:
        """Answers once its files are being written. What has ended is stopped already."""
        if OperationKind.PROFILE not in self._capabilities().operations:
            raise UnsupportedOperation("this engine does not offer profile")
        profile_id = read_stop(request)
        await self._check_key(request)
        await self._state.refresh()
        wanted = request.expected_revision if request.HasField("expected_revision") else None
        check_revision(wanted, self._state.facts())
        reached = await self._reached(profile_id)
        run = self._desk.profile_run(profile_id)
        if run is not None:
            self._desk.check_profiling()
            await run.beyond(None)
            run.stop()
            await run.beyond(ProfileState.RUNNING)
            reached = await self._reached(profile_id)
        return admin_pb2.StopProfileResponse(
            operation_id=profile_id,
            profile_id=profile_id,
            state=PROFILE_STATE.number(reached),
        )

    async def _check_key(self, request: admin_pb2.StopProfileRequest) -> None:
        """A stop is no operation of its own and leaves no key, but may not borrow one."""
        known = await self._state.journal.by_key(request.idempotency_key)
        if known is not None:
            replay_of(KeyRecord(known.fingerprint, known.operation.id), fingerprint(request))

    async def _reached(self, profile_id: str) -> ProfileState:
        """Raises UnknownProfile."""
        run = self._desk.profile_run(profile_id)
        if run is not None and run.reached is not None:
            return run.reached
        try:
            operation = (await self._desk.find(operation_id=profile_id)).operation
        except UnknownOperation:
            raise UnknownProfile("this engine knows no such profile") from None
        if operation.kind is not OperationKind.PROFILE:
            raise UnknownProfile("this engine knows no such profile")
        if operation.done and operation.state is not OperationState.SUCCEEDED:
            return ProfileState.FAILED
        return ProfileState.READY
