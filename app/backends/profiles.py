"""A profile: started by a unary call, looked at until its files exist, and stopped by another call.

The engine keeps it under the order's key, so starting it again attaches to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import datetime
from typing import TypeAlias

import grpc

from app.backends import letters, status_map
from app.backends.endpoint import CLOSED, Endpoint, NotKnownThere, was_asked_to_stop
from app.backends.port import EngineRefused, EngineSilent, Order, OutcomeLost, Silence
from app.backends.spelling import Malformed, number_of, text_of
from app.backends.streams import StreamLimits, no_way
from app.backends.stubs import stub_of
from app.domain.commands import StartProfile
from app.domain.operation import OperationError, Progress
from app.domain.transitions import Completed, EngineAccepted, Fact, Failed, Progressed
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc

ReadRecord: TypeAlias = Callable[[str, float], Awaitable[admin_pb2.AdminOperation]]
"""By the engine's own id, within so many seconds. Raises EngineSilent, NotKnownThere."""

_LOOK_S = 0.5


async def profile_order(
    endpoint: Endpoint,
    order: Order,
    command: StartProfile,
    read: ReadRecord,
    limits: StreamLimits,
    start_s: float,
    now: Callable[[], datetime],
) -> AsyncGenerator[Fact, None]:
    """As `EngineBackend.carry_out` promises. `start_s`: the longest that the start may take."""
    try:
        started = await _start(endpoint, order, command, start_s, now)
    except grpc.aio.AioRpcError as error:
        endpoint.failed(error)
        failure = status_map.failure_of(error)
        if failure is None:
            refusal = status_map.refusal_of(error)
            if refusal is not None:
                raise EngineRefused(refusal) from error
            raise OutcomeLost(status_map.lost_because(error)) from error
        yield Failed(error=failure)
        return
    if started.already_running:
        # Somebody else's order of the same profile: there is one, and it is not this one's.
        yield Completed(result={"changed": False, "profile_id": text_of(started.profile_id)})
        return
    phase = ""
    while True:
        try:
            known = await read(started.operation_id, limits.ask_s)
            end = letters.end_of(known)
        except (EngineSilent, NotKnownThere, Malformed) as silent:
            raise OutcomeLost("the engine does not tell how the profile goes") from silent
        if not phase:
            yield EngineAccepted(
                engine_sequence=1,  # told once, however often it is attached to
                engine_operation_id=text_of(started.operation_id),
                instance_id=text_of(known.instance_id) or None,
            )
        told = text_of(known.progress.phase, 64) or "started"
        if told != phase and end is None:
            phase = told
            yield Progressed(progress=Progress(phase))
        if end is not None:
            yield end
            return
        await asyncio.sleep(_LOOK_S)


async def stop(
    endpoint: Endpoint, read: ReadRecord, engine_operation_id: str, key: str, timeout_s: float
) -> None:
    """As `EngineBackend.stop_profile` promises."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    try:
        known = await read(engine_operation_id, timeout_s)
    except NotKnownThere as unknown:
        message = "the engine knows no such profile any more"
        error = OperationError("NOT_FOUND", "PROFILE_NOT_FOUND", message)
        raise EngineRefused(error) from unknown
    request = admin_pb2.StopProfileRequest(
        idempotency_key=key, profile_id=known.profile_id or engine_operation_id
    )
    request.whole_engine.SetInParent()
    channel, metadata = await endpoint.open()
    stub = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    try:
        left_s = max(ends_at - loop.time(), 0.001)
        await stub.StopProfile(request, timeout=left_s, metadata=metadata)
    except CLOSED as closed:
        if was_asked_to_stop(closed):
            raise
        raise EngineSilent(Silence.UNREACHABLE) from closed
    except grpc.aio.AioRpcError as error:
        silent = endpoint.failed(error)
        refusal = status_map.refusal_of(error)
        if refusal is not None:
            raise EngineRefused(refusal) from error
        raise silent from error


async def _start(
    endpoint: Endpoint,
    order: Order,
    command: StartProfile,
    timeout_s: float,
    now: Callable[[], datetime],
) -> admin_pb2.StartProfileResponse:
    try:
        channel, metadata = await endpoint.open_for(order, now)
    except EngineSilent as silent:
        raise EngineRefused(no_way(silent)) from silent
    request = admin_pb2.StartProfileRequest(
        kind=number_of(admin_pb2.ProfilerKind, command.profiler),
        record_shapes=command.record_shapes,
        with_stack=command.with_stack,
    )
    if command.steps is not None:
        request.steps = command.steps
    if command.duration_ms is not None:
        request.duration_ms = command.duration_ms
    letters.address(request, order)
    stub = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    try:
        return await stub.StartProfile(request, timeout=timeout_s, metadata=metadata)
    except CLOSED as closed:
        if was_asked_to_stop(closed):
            raise
        raise OutcomeLost("the connection to the engine was closed") from closed
