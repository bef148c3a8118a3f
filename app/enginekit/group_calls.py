"""JoinGroup: a trainer's process group joined before any update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from app.domain.capabilities import Capabilities
from app.domain.errors import FailedPrecondition, UnsupportedOperation
from app.domain.kinds import WeightTransferBackend
from app.domain.weight_sessions import NcclTransfer
from app.enginekit.desk import OrderDesk
from app.enginekit.runtime import Runtime
from app.enginekit.session_requests import read_group
from app.enginekit.tensor_requests import bad_field
from app.rpc.openengine.v1 import admin_pb2


@runtime_checkable
class GroupRuntime(Protocol):
    """A runtime that joins a trainer's group by itself, and stays in it over several sessions
    (`weight_sessions` names `nccl`). A session by the very same group then does not join again."""

    async def join_group(self, transfer: NcclTransfer) -> None:
        """Returns when every rank is in. A group that they are in already is left first: the
        trainer has opened one anew, perhaps under the same name. One call at a time, and begun
        while no exclusive order runs; it goes on when its caller has gone. Raises
        RuntimeFault."""


class GroupBeingJoined(FailedPrecondition):
    reason = "GROUP_BEING_JOINED"


class GroupCalls:
    """Of the same call twice at once the second waits for the first."""

    def __init__(
        self, runtime: Runtime, desk: OrderDesk, capabilities: Callable[[], Capabilities]
    ) -> None:
        self._runtime = runtime
        self._desk = desk
        self._capabilities = capabilities
        self._joining: tuple[NcclTransfer, asyncio.Task[None]] | None = None

    async def join(self, request: admin_pb2.JoinGroupRequest) -> None:
        """Raises UnsupportedOperation, InvalidArgument, GroupBeingJoined, NamedBusy, Stopping,
        RuntimeFault."""
        runtime, can = self._runtime, self._capabilities()
        offered = WeightTransferBackend.NCCL in can.weight_sessions
        if not isinstance(runtime, GroupRuntime) or not offered:
            raise UnsupportedOperation("this engine joins with the session that names the group")
        if not request.HasField("group"):
            raise bad_field("/group", "say which group")
        transfer = read_group(request.group)
        transfer.check_ranks(can.world_size)
        if self._joining is None or self._joining[1].done():
            self._joining = transfer, self._desk.beside(runtime.join_group(transfer))
        named, task = self._joining
        if named != transfer:
            raise GroupBeingJoined("another group is being joined: wait for its end")
        await asyncio.shield(task)
