"""Having an engine join a trainer's process group before any update."""

from __future__ import annotations

import grpc

from app.backends import status_map
from app.backends.endpoint import CLOSED, Endpoint, was_asked_to_stop
from app.backends.port import EngineRefused, EngineSilent, Silence
from app.backends.session_letters import group_of
from app.backends.stubs import stub_of
from app.domain.weight_sessions import NcclTransfer
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc


async def join(endpoint: Endpoint, transfer: NcclTransfer, timeout_s: float) -> bool:
    """Whether the engine is in it; False: it joins with the session that names the group. Raises
    EngineRefused; EngineSilent: it is not known."""
    channel, metadata = await endpoint.open()
    stub = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    request = admin_pb2.JoinGroupRequest(group=group_of(transfer))
    try:
        await stub.JoinGroup(request, timeout=timeout_s, metadata=metadata)
    except CLOSED as closed:
        if was_asked_to_stop(closed):
            raise
        raise EngineSilent(Silence.UNREACHABLE) from closed
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return False
        silent = endpoint.failed(error)
        refusal = status_map.refusal_of(error)
        if refusal is not None:
            raise EngineRefused(refusal) from error
        raise silent from error
    return True
