"""Receives weights for all ranks: ``python -m app.reference_engine.transfer_process FD``.

Its life hangs on the socket FD. The front end closes that, or kills the process, as soon as it
needs nothing more of it; there is no other way to end.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import queue
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from app.reference_engine.change_orders import SharedTensor
from app.reference_engine.rank_connection import leave, read_frame
from app.reference_engine.tensor_files import DTYPES
from app.reference_engine.trainer_group import GroupBroken, TrainerGroup
from app.reference_engine.transfer_messages import (
    JoinGroup,
    MemberIs,
    MemberStep,
    ReceiveTensors,
    TensorIsHere,
    TensorsReceived,
    TransferHalted,
    TransferOrder,
    TransferReport,
)
from app.reference_engine.wire import decode_body, encode_frame

T = TypeVar("T")

# A sender with less than a tensor's bytes leaves the rest of it as it was, and nobody says so. What
# is put into the last element beforehand is a signalling NaN, which no arithmetic ever gives.
_UNTOUCHED = {
    "F64": struct.pack("<Q", 0x7FF4_5A5A_5A5A_5A5A),
    "F32": struct.pack("<I", 0x7FA5_5A5A),
    "F16": struct.pack("<H", 0x7D5A),
    "BF16": struct.pack("<H", 0x7FA5),
}


class Halted(Exception):
    def __init__(self, rank: int, tensor: str, cause: str) -> None:
        super().__init__(cause)
        self.told = TransferHalted(rank, tensor, cause)


class Receiver:
    """Carries orders out with a thread for each member, since they wait for one another."""

    def __init__(self, tell: Callable[[TransferReport], None]) -> None:
        self._tell = tell
        self._members: list[TrainerGroup] = []

    def carry_out(self, order: TransferOrder) -> None:
        """Raises Halted, after which nothing more can be done here."""
        match order:
            case JoinGroup():
                self._members = _at_once(order.ranks, lambda rank: self._join(order, rank))
            case ReceiveTensors():
                self._receive_all(order)
                self._tell(TensorsReceived())

    def _join(self, order: JoinGroup, rank: int) -> TrainerGroup:
        def reached(step: MemberStep) -> None:
            self._tell(MemberIs(rank, step))

        try:
            return TrainerGroup(order, rank, reached)
        except GroupBroken as broken:
            raise Halted(rank, "", str(broken)) from broken

    def _receive_all(self, order: ReceiveTensors) -> None:
        fd = os.open(order.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            segment = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        sums = _at_once(
            len(self._members), lambda rank: self._receive(order.tensors, rank, segment)
        )
        for number, one in enumerate(order.tensors):
            for rank, mine in enumerate(sums):
                if mine[number] != sums[0][number]:
                    raise Halted(rank, one.name, "it received other bytes than rank 0")

    def _receive(
        self, tensors: tuple[SharedTensor, ...], rank: int, segment: mmap.mmap
    ) -> list[bytes]:
        """The digests of what one member received, where there are others to compare them with.
        What the first one received is kept."""
        alone = len(self._members) == 1
        sums = []
        for index, one in enumerate(tensors):
            # What has no name in torch's list here is eight bits wide.
            element = DTYPES[one.dtype].itemsize if one.dtype in DTYPES else 1
            size = math.prod(one.shape) * element
            if rank == 0:
                target = torch.frombuffer(segment, dtype=torch.uint8, count=size, offset=one.offset)
            else:
                target = torch.empty(size, dtype=torch.uint8)
            self._receive_one(one, rank, target)
            raw: Any = target.numpy()
            sums.append(b"" if alone else hashlib.sha256(memoryview(raw)).digest())
            self._tell(TensorIsHere(rank, index))
        return sums

    def _receive_one(self, one: SharedTensor, rank: int, target: Tensor) -> None:
        untouched = _UNTOUCHED.get(one.dtype, b"")
        last: Any = target[target.numel() - len(untouched) :].numpy()
        last[:] = bytearray(untouched)
        try:
            self._members[rank].receive(target)
        except GroupBroken as broken:
            raise Halted(rank, one.name, str(broken)) from broken
        if untouched and last.tobytes() == untouched:
            raise Halted(rank, one.name, "fewer bytes were sent than it has")


def _at_once(ranks: int, act: Callable[[int], T]) -> list[T]:
    """For every rank, in rank order; the first to fail is told, others may wait for ever."""
    pool = ThreadPoolExecutor(ranks)
    asked: list[Future[T]] = [pool.submit(act, rank) for rank in range(ranks)]
    ended, _ = wait(asked, return_when=FIRST_EXCEPTION)
    for one in asked:
        if one in ended and (error := one.exception()) is not None:
            raise error
    pool.shutdown()
    return [one.result() for one in asked]


def main() -> None:
    """Entry point of the process; the argument is the number of an inherited socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The library's way out is to abort, which is told to whoever ordered; no need of a file of it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    connected = socket.socket(fileno=int(sys.argv[1]))
    sending = threading.Lock()
    orders: queue.SimpleQueue[TransferOrder] = queue.SimpleQueue()

    def tell(report: TransferReport) -> None:
        frame = encode_frame([report])
        try:
            with sending:
                connected.sendall(frame)
        except OSError:
            leave()

    def read() -> None:
        try:
            while True:
                for order in decode_body(read_frame(connected)):
                    orders.put(order)
        except (EOFError, OSError):
            leave()

    threading.Thread(target=read, name="front end", daemon=True).start()
    receiver = Receiver(tell)
    try:
        while True:
            receiver.carry_out(orders.get())
    except Halted as halted:
        tell(halted.told)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        tell(TransferHalted(0, "", str(error) or type(error).__name__))
    threading.Event().wait()


if __name__ == "__main__":
    main()
