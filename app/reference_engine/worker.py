"""One rank as a process of its own: ``python -m app.reference_engine.worker FD``.

Its life hangs on the socket it was given. When the front end goes, however it goes, the socket ends
and so does this process, at once: a reading thread sees it even in the middle of a long step.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from app.reference_engine import messages as m
from app.reference_engine.errors import OrderRefused, ReferenceEngineError
from app.reference_engine.wire import HEADER, decode_body, encode_frame, frame_length

if TYPE_CHECKING:
    from app.reference_engine.core import EngineCore


class _Connection:
    """The rank's end of the socket pair. Orders are read by a thread, reports are written here."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._orders: queue.SimpleQueue[m.Entry] = queue.SimpleQueue()

    def receive_start(self) -> m.Start:
        start = decode_body(self._read_frame())[0]
        if not isinstance(start, m.Start):
            raise TypeError(f"expected Start, got {type(start).__name__}")
        return start

    def start_reading(self) -> None:
        threading.Thread(target=self._read_orders, name="orders", daemon=True).start()

    def next_order(self, timeout_s: float | None) -> m.Entry | None:
        """The next order, waiting at most that long (None: until there is one)."""
        try:
            if timeout_s is not None and timeout_s <= 0:
                return self._orders.get_nowait()
            return self._orders.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send(self, reports: list[m.Report]) -> None:
        try:
            self._socket.sendall(encode_frame(reports))
        except OSError:
            _leave()

    def _read_orders(self) -> None:
        try:
            while True:
                for entry in decode_body(self._read_frame()):
                    self._orders.put(entry)
        except (EOFError, OSError):
            _leave()

    def _read_frame(self) -> bytes:
        return self._read(frame_length(self._read(HEADER.size)))

    def _read(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            piece = self._socket.recv(min(size - len(received), 1 << 20))
            if not piece:
                raise EOFError
            received += piece
        return bytes(received)


def _leave() -> None:
    """End the process without ceremony: there is nobody left to serve, and a thread in the middle
    of a computation could delay an orderly exit for long."""
    os._exit(0)


def run(connection: _Connection) -> None:
    """Load, report ready, then alternate between orders and steps until told to stop."""
    start = connection.receive_start()
    connection.start_reading()
    try:
        # Imported here: a rank can then say on its connection that torch itself will not load.
        from app.reference_engine.assembly import build_core

        core, ready = build_core(Path(start.checkpoint), start.settings, start.rank)
    except (ReferenceEngineError, ImportError, MemoryError, RuntimeError) as error:
        connection.send([m.StartFailed(rank=start.rank, message=str(error))])
        return
    connection.send([ready])
    delay_s = start.settings.step_delay_ms / 1000
    next_step_at = time.monotonic()
    while True:
        wait_s = next_step_at - time.monotonic() if core.runnable else None
        entry = connection.next_order(wait_s)
        if entry is not None:
            connection.send(_carry_out(core, entry, start.rank))
            if isinstance(entry.order, m.Shutdown):
                return
        elif reports := core.step():
            connection.send([*reports])
            next_step_at = time.monotonic() + delay_s


def _carry_out(core: EngineCore, entry: m.Entry, rank: int) -> list[m.Report]:
    """What the order brought about, and then its acknowledgement: when a caller reads that an
    abort is done, the ends of the aborted requests are there already."""
    try:
        result, reports = core.apply(entry.order)
    except OrderRefused as refusal:
        return [m.Ack(index=entry.index, rank=rank, error=str(refusal))]
    return [*reports, m.Ack(index=entry.index, rank=rank, result=result)]


def main() -> None:
    """Entry point of the process; the only argument is the number of the inherited socket."""
    # The front end alone decides about the end: a Ctrl-C for the group, or a service manager that
    # signals all processes, must not take the rank away while the front end still winds up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run(_Connection(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
