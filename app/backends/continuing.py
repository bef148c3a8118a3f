"""A further call of an order that the engine carries out already: sent until it is taken on."""

from __future__ import annotations

from typing import Any

import grpc

from app.backends import status_map
from app.backends.endpoint import CLOSED, Endpoint, was_asked_to_stop
from app.backends.port import EngineRefused, EngineSilent, Silence
from app.backends.stubs import stub_of
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc


async def take_further(
    endpoint: Endpoint, request: admin_pb2.UpdateWeightsRequest, timeout_s: float
) -> None:
    """Returns when the engine has taken it on, which its first event says; what follows is told on
    the stream of the order itself. Raises EngineRefused, EngineSilent."""
    channel, metadata = await endpoint.open()
    stub: Any = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    try:
        call = stub.UpdateWeights(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.UsageError as closed:
        raise EngineSilent(Silence.UNREACHABLE) from closed
    try:
        event = await call.read()
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
    finally:
        call.cancel()
    if not isinstance(event, admin_pb2.AdminOperationEvent):
        raise EngineSilent(Silence.MALFORMED)
