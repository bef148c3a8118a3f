"""The stream of one order: sent, read to its end, and never waited on for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, cast

import grpc

from app.backends import letters, status_map
from app.backends.channels import MAX_MESSAGE_BYTES
from app.backends.endpoint import Endpoint, Metadata
from app.backends.port import (
    EngineRefused,
    EngineSilent,
    Found,
    Order,
    OutcomeLost,
    Silence,
)
from app.backends.spelling import Malformed
from app.backends.stubs import stub_of
from app.domain.kinds import FailureEffect, OperationKind
from app.domain.operation import OperationError
from app.domain.transitions import Cancelled, Completed, Fact, Failed
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc

log = logging.getLogger(__name__)

_ENDS = (Completed, Failed, Cancelled)

Find = Callable[[str, float], Awaitable[Found | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Seconds.

    `idle_s`: silent for so long, the engine is asked whether it still runs the order. `settle_s`:
    what the engine has beyond the deadline to say how it ended. `attached_s`: how long a stream
    may last that is attached when the deadline is over. `abort_s`: for one abort of a request.
    """

    idle_s: float = 15.0
    ask_s: float = 5.0
    settle_s: float = 10.0
    attached_s: float = 600.0
    abort_s: float = 10.0


class _Call(Protocol):
    async def read(self) -> Any: ...

    def cancel(self) -> bool: ...


async def order_stream(
    endpoint: Endpoint, order: Order, find: Find, limits: StreamLimits, now: Callable[[], datetime]
) -> AsyncGenerator[Fact, None]:
    """As `EngineBackend.carry_out` promises, for an order that the engine keeps a record of."""
    kind = order.command.kind
    request = letters.request_of(order)
    if request.ByteSize() > MAX_MESSAGE_BYTES:
        raise EngineRefused(_unsent("RESOURCE_EXHAUSTED", "ORDER_TOO_LARGE", "it is too large"))
    try:
        channel, metadata = await endpoint.open_for(order, now)
    except EngineSilent as silent:
        raise EngineRefused(no_way(silent)) from silent
    left_s = (order.deadline_at - now()).total_seconds()
    longest_s = (left_s if left_s > 0 else limits.attached_s) + limits.settle_s
    try:
        call = _open(channel, kind, request, longest_s, metadata)
    except grpc.aio.UsageError as closed:  # the channel, a moment ago: nothing was sent
        raise EngineRefused(no_way(EngineSilent(Silence.UNREACHABLE))) from closed
    heard = 0
    engine_operation_id = ""
    try:
        while True:
            event = await _next(call, order.operation_id, find, limits)
            if event is None:
                raise OutcomeLost("the engine ended the stream without saying how it ended")
            fact = letters.fact_of(event, kind)
            if event.sequence != heard + 1:
                raise Malformed("events with a gap")
            if heard and event.operation_id != engine_operation_id:
                raise Malformed("events of two operations")
            heard, engine_operation_id = event.sequence, event.operation_id
            yield fact
            if isinstance(fact, _ENDS):
                return
    except grpc.aio.AioRpcError as error:
        endpoint.failed(error)
        # Once it has said anything it has taken the order on, whatever the status claims.
        refusal = None if heard else status_map.refusal_of(error)
        if refusal is not None:
            raise EngineRefused(refusal) from error
        raise OutcomeLost(status_map.lost_because(error)) from error
    except Malformed as malformed:
        log.warning("order %s: an event can't be read: %s", order.operation_id, malformed)
        raise OutcomeLost("the engine's reply can't be read") from malformed
    finally:
        call.cancel()


async def _next(
    call: _Call, operation_id: str, find: Find, limits: StreamLimits
) -> admin_pb2.AdminOperationEvent | None:
    """None: the engine ended the stream. Raises AioRpcError, or OutcomeLost when the engine is
    silent and does not confirm that it still runs the order.

    A drain may have nothing to say for minutes, so silence alone is no loss.
    """
    # A task, since a read that is cancelled would take the whole call with it.
    reading = asyncio.ensure_future(call.read())
    was_over = False
    try:
        while True:
            await asyncio.wait({reading}, timeout=limits.idle_s)
            if reading.cancelled():
                raise OutcomeLost("the connection to the engine was closed")
            if reading.done():
                event = reading.result()
                if event is grpc.aio.EOF:
                    return None
                return cast("admin_pb2.AdminOperationEvent", event)
            try:
                found = await find(operation_id, limits.ask_s)
            except EngineSilent as silent:
                if reading.done():
                    continue  # what it says counts for more than that it did not answer
                raise OutcomeLost("the engine stopped answering") from silent
            if not reading.done() and (found is None or was_over):
                # What has ended is told on the stream at once. This one does not tell any more.
                raise OutcomeLost("the engine no longer tells how the order goes")
            was_over = found is not None and found.ended
    finally:
        if not reading.cancel() and not reading.cancelled():
            reading.exception()  # seen here, should nobody have asked for the result


def no_way(silent: EngineSilent) -> OperationError:
    """There was no connection to send it on, or nothing to show."""
    if silent.reason is Silence.AUTH_REFUSED:
        said = "the gateway has no credential to show this engine"
        return _unsent("UNAUTHENTICATED", "ENGINE_AUTH_REFUSED", said)
    said = "the engine's address can't be used"
    return _unsent("UNAVAILABLE", "ENGINE_UNREACHABLE", said, retryable=True)


def _unsent(code: str, reason: str, message: str, *, retryable: bool = False) -> OperationError:
    return OperationError(
        code=code, reason=reason, message=message, retryable=retryable, effect=FailureEffect.NONE
    )


def _open(
    channel: grpc.aio.Channel,
    kind: OperationKind,
    request: letters.Request,
    timeout_s: float,
    metadata: Metadata,
) -> _Call:
    stub = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    methods: dict[OperationKind, Any] = {
        OperationKind.FLUSH_CACHES: stub.FlushCaches,
        OperationKind.PAUSE: stub.Pause,
        OperationKind.RESUME: stub.Resume,
        OperationKind.RELEASE_RESOURCES: stub.ReleaseResources,
        OperationKind.RESTORE_RESOURCES: stub.RestoreResources,
        OperationKind.UPDATE_WEIGHTS: stub.UpdateWeights,
        OperationKind.RECONFIGURE_SERVING: stub.ReconfigureServing,
    }
    return cast("_Call", methods[kind](request, timeout=timeout_s, metadata=metadata))
