"""A rank's ends of its connections: to the front end, and between the first rank and the others."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Sequence

from app.reference_engine import messages as m
from app.reference_engine.errors import PeerLost
from app.reference_engine.pulse import Pulse
from app.reference_engine.wire import HEADER, decode_body, encode_frame, frame_length

LogItem = m.Entry | m.StepPlan


def leave() -> None:
    """End the process without ceremony: there is nobody left to serve, and a thread in the middle
    of a computation could delay an orderly exit for long."""
    os._exit(0)


class Inbox:
    """The order log as it arrives, read by threads for the main one."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[LogItem] = queue.SimpleQueue()

    def put(self, item: LogItem) -> None:
        self._items.put(item)

    def next(self, timeout_s: float | None) -> LogItem | None:
        """The next item, waiting at most that long (None: until there is one)."""
        try:
            if timeout_s is not None and timeout_s <= 0:
                return self._items.get_nowait()
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            return None


class FrontEnd:
    """The socket pair with the front end. When that goes, however it goes, this process goes."""

    def __init__(self, connected: socket.socket, inbox: Inbox, pulse: Pulse) -> None:
        self._socket = connected
        self._inbox = inbox
        self._pulse = pulse
        self._sending = threading.Lock()
        self._rank = 0

    def receive_start(self) -> m.Start:
        start = decode_body(read_frame(self._socket))[0]
        if not isinstance(start, m.Start):
            raise TypeError(f"expected Start, got {type(start).__name__}")
        self._rank = start.rank
        return start

    def start_reading(self) -> None:
        threading.Thread(target=self._read, name="front end", daemon=True).start()

    def send(self, reports: Sequence[m.Report]) -> None:
        frame = encode_frame(reports)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError:
            leave()

    def _read(self) -> None:
        try:
            while True:
                for message in decode_body(read_frame(self._socket)):
                    if isinstance(message, m.Ping):
                        # From this thread, since the main one may be what is asked about.
                        self.send([self._pong(message.number)])
                    else:
                        self._inbox.put(message)
        except (EOFError, OSError):
            leave()

    def _pong(self, number: int) -> m.Pong:
        return m.Pong(
            number=number,
            rank=self._rank,
            step_age_s=self._pulse.step_age_s(),
            waits=self._pulse.waits,
        )


class Followers:
    """The first rank's connections to the others."""

    def __init__(self, sockets: Sequence[socket.socket], pulse: Pulse) -> None:
        self._sockets = sockets
        self._pulse = pulse

    def send(self, item: LogItem) -> None:
        """Hand an item of the log on to all. Raises PeerLost."""
        if not self._sockets:
            return
        frame = encode_frame([item])
        try:
            # A rank that does not read any more lets this wait once the buffer is full.
            with self._pulse.waiting():
                for one in self._sockets:
                    one.sendall(frame)
        except OSError as error:
            raise PeerLost(f"the order log can not be handed on ({error})") from error


def follow(leader: socket.socket, inbox: Inbox) -> None:
    """Read the log that the first rank hands on. Its end is for the front end to judge."""

    def read() -> None:
        try:
            while True:
                for item in decode_body(read_frame(leader)):
                    inbox.put(item)
        except (EOFError, OSError):
            return

    threading.Thread(target=read, name="log", daemon=True).start()


def read_frame(connected: socket.socket) -> bytes:
    """The body of the next frame. Raises EOFError or OSError when the other end is gone."""
    return _read(connected, frame_length(_read(connected, HEADER.size)))


def _read(connected: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = connected.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)
