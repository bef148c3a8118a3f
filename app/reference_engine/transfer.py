"""Weights that a trainer broadcasts, as the front end has them received; see ``transfer_messages``.

One transfer joins one group, and may be asked for tensors as often as there are more to come. All
that it takes from the machine ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence

from app.reference_engine.change_orders import SharedTensor
from app.reference_engine.channel import SocketConnection
from app.reference_engine.errors import TransferFailed
from app.reference_engine.processes import own_environment, own_module
from app.reference_engine.transfer_messages import (
    JoinGroup,
    MemberIs,
    MemberStep,
    ReceiveTensors,
    TensorIsHere,
    TensorsReceived,
    TransferHalted,
)
from app.reference_engine.wire import MalformedFrame, encode_frame

_FIRST_RANK = 0


class WeightTransfer:
    """Lives on one event loop. Times are on that loop's clock."""

    def __init__(
        self,
        group: JoinGroup,
        process: asyncio.subprocess.Process,
        connection: SocketConnection,
    ) -> None:
        self._group = group
        self._process = process
        self._connection = connection
        self._steps: dict[int, MemberStep] = {}
        self._tensors: tuple[SharedTensor, ...] = ()
        self._received = dict.fromkeys(range(group.ranks), 0)

    async def join(self, deadline_at: float) -> None:
        """Until all members of the group are there. Raises TransferFailed."""
        self._connection.send(encode_frame([self._group]))
        joined: set[int] = set()
        async with self._in_time(deadline_at):
            while len(joined) < self._group.ranks:
                match await self._told():
                    case MemberIs(rank=rank, step=step):
                        self._steps[rank] = step
                        if step is MemberStep.JOINED:
                            joined.add(rank)

    async def receive(
        self,
        path: str,
        tensors: Sequence[SharedTensor],
        deadline_at: float,
        progress: Callable[[int], None] = lambda _count: None,
    ) -> None:
        """The next broadcasts, which are these tensors, into the file at ``path``. ``progress`` is
        told how many are there. Raises TransferFailed; then the transfer is over."""
        self._tensors = tuple(tensors)
        self._received = dict.fromkeys(self._received, 0)
        self._connection.send(encode_frame([ReceiveTensors(path, self._tensors)]))
        async with self._in_time(deadline_at):
            while True:
                match await self._told():
                    case TensorIsHere(rank=rank, index=index):
                        self._received[rank] = index + 1
                        progress(min(self._received.values()))
                    case TensorsReceived():
                        return

    async def close(self) -> None:
        """Returns when the process is gone, and with it every connection of the group."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._connection.close()

    @contextlib.asynccontextmanager
    async def _in_time(self, deadline_at: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline_at):
                yield
        except TimeoutError:
            rank, tensor = self._behind()
            raise TransferFailed(rank, tensor, self._waits_for(rank)) from None

    async def _told(self) -> object:
        """What the process says next. Raises TransferFailed when that is that it can not go on,
        or nothing any more."""
        try:
            (told,) = await self._connection.receive()
        except (EOFError, OSError, MalformedFrame) as error:
            raise await self._ended() from error
        if isinstance(told, TransferHalted):
            raise TransferFailed(told.rank, told.tensor or None, told.cause)
        return told

    def _behind(self) -> tuple[int, str | None]:
        """The rank that has the least, and the tensor that it has not."""
        if self._tensors:
            rank = min(self._received, key=lambda one: self._received[one])
            return rank, self._tensors[min(self._received[rank], len(self._tensors) - 1)].name
        for rank in self._received:
            if self._steps.get(rank) is not MemberStep.JOINED:
                return rank, None
        return _FIRST_RANK, None

    def _waits_for(self, rank: int) -> str:
        if self._tensors:
            count = self._received[rank]
            return f"it was not sent in time ({count} of {len(self._tensors)} tensors came)"
        match self._steps.get(rank):
            case None:
                return "the process that receives did not start in time"
            case MemberStep.LOOKING:
                return "nobody was at the rendezvous in time: the trainer did not come"
        return "the group was not complete in time: another member did not join it"

    async def _ended(self) -> TransferFailed:
        code = await self._process.wait()
        if code != -signal.SIGABRT or not self._tensors:
            rank, tensor = self._behind()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return TransferFailed(rank, tensor, f"the process that receives ended ({how})")
        # The library's way with a message that is too long. A member says what it has before it
        # asks for more, so it was the one that had told of the most.
        rank = max(self._received, key=lambda one: self._received[one])
        at = min(self._received[rank], len(self._tensors) - 1)
        return TransferFailed(rank, self._tensors[at].name, "more bytes were sent than it has")


@contextlib.asynccontextmanager
async def transfer_by(group: JoinGroup) -> AsyncIterator[WeightTransfer]:
    """A transfer for the time of the block; nothing of it is left afterwards. It has not joined."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *own_module("app.reference_engine.transfer_process"),
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=own_environment(),
            )
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()  # which ends the process, if there is one
        raise
    transfer = WeightTransfer(group, process, SocketConnection(reader, writer))
    try:
        yield transfer
    finally:
        # Also when cancelled twice: a process that nobody waits for stays as a zombie.
        await asyncio.shield(transfer.close())
