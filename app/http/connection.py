"""One client's connection: what it may take before there is a request that can be judged.

uvicorn waits for ever for a head that does not end, and keeps all of it. Without a token anybody
could fill the memory so, or hold connections until none are left. Nor does it ever give up a client
that takes nothing of its answer.
"""

from __future__ import annotations

import secrets
import socket
import struct
from asyncio import BaseTransport, TimerHandle
from contextvars import copy_context
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.auth.identities.known import Peer, SocketPeer, TcpPeer, TlsPeer
from app.clock import uuid7
from app.http.middleware.context import SAFE_HEADERS
from app.http.problems import problem_of
from app.http.refusals import (
    EdgeRefusal,
    HeadTooLarge,
    HeadTooSlow,
    MalformedRequest,
    Overloaded,
    TooManyHeaders,
)
from app.observability.log import logger
from app.observability.tracing import RequestIds, enter

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. A little more gets through where it comes in one piece. So much may
come, too, of what a body is wrapped in, between two pieces of it and behind the last."""
MAX_HEADERS = 100

_log = logger("chadburn.http")


class Connection(HttpToolsProtocol):
    """`receive_timeout_s`: how long a connection may go without a whole head, from its beginning,
    or from the first byte of a later request. Between requests uvicorn's keep-alive counts.
    `send_timeout_s`: how long its client may take nothing of what waits to be sent.

    `identity`: whose listener it came to, where that has one of its own.

    Beyond `most` connections a new one takes the place of the one that has been without a request
    for longest: so a probe gets in, however many have come to say nothing.
    """

    receive_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    most: int = 4096
    identity: str | None = None
    unused: dict[Connection, None]
    """Those without a request under way, the oldest first. Of one server."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._in_head = True
        self._head_bytes = 0
        self._chunk_bytes = 0  # of a piece that begins with a head, until that is counted
        self._headers = 0
        self._wrapping_bytes = 0  # of a body since the last piece of it
        self._why: EdgeRefusal | None = None
        self._idle = True
        self._timer: TimerHandle | None = None
        self._unsent_bytes = 0
        self._send_timer: TimerHandle | None = None
        self._peer: Peer | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(cast("Any", transport))
        self._peer = _peer_of(transport, self.identity)
        self._begin_head()
        if len(self.connections) > self.most:
            self._make_room()
        self.unused[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        self.unused.pop(self, None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self.unused[self] = None
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        elif not self._idle:
            self._wrapping_bytes += len(data)
        self._chunk_bytes = len(data) if self._idle else 0
        super().data_received(data)
        waiting = self._head_bytes if self._in_head else self._wrapping_bytes
        if waiting > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(MAX_HEAD_BYTES))

    def on_message_begin(self) -> None:
        if not self._in_head:
            self._begin_head()
            # What came before it in the same piece belongs to the request before.
            self._head_bytes = self._chunk_bytes or 1
        self._idle, self._chunk_bytes = False, 0
        self._headers = self._wrapping_bytes = 0
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["state"]["peer"] = self._peer

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._why = TooManyHeaders(MAX_HEADERS)
            raise ValueError  # the parser stops at it, and `send_400_response` is called
        if self._in_head:
            super().on_header(name, value)
        # What comes behind a body would be added to the headers of a request that is being judged.

    def on_body(self, body: bytes) -> None:
        self._wrapping_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self.unused.pop(self, None)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._idle = True
        self._wrapping_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, as a problem like any other."""
        del msg  # its own words, in a form of its own
        self._refuse(self._why or MalformedRequest("The request could not be read."))

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._stop_timer()
        self._timer = self.loop.call_later(self.receive_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> None:
        oldest = next(iter(self.unused), None)
        if oldest is None:
            self._refuse(Overloaded("As many connections are open as may be."))
        else:
            # Whatever it still has to send, its client takes none of it.
            del self.unused[oldest]
            oldest.transport.abort()

    def _watch_client(self, looks: int = 2) -> None:
        """Twice within the time, so that a moment in which this process itself stood still is not
        taken for the client's silence."""
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(
            self.send_timeout_s / 2, self._look_at_client, looks - 1
        )

    def _look_at_client(self, looks: int) -> None:
        # While it is paused nothing is added: what is not less has not been taken from.
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_client()
        elif looks:
            self._watch_client(looks)
        else:
            _log.info("client_cut_off", why="takes_nothing")
            self.transport.abort()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _too_slow(self) -> None:
        if self._head_bytes:
            self._refuse(HeadTooSlow())
        else:
            self.transport.close()  # it never asked for anything

    def _refuse(self, refusal: EdgeRefusal) -> None:
        """Say so and hang up. Where an answer has begun it is only broken off: the rest of what
        is sent would be taken for a part of it."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        answering = cast("RequestResponseCycle | None", self.cycle)
        if answering is None or answering.response_complete or not answering.response_started:
            # A context of its own: this one is shared by all that the connection brings.
            self.transport.write(copy_context().run(_answer, refusal))
        self.transport.close()


def _peer_of(transport: BaseTransport, identity: str | None) -> Peer | None:
    """Who is at the other end, as far as the system or a certificate says; None: nobody does."""
    taken = transport.get_extra_info("socket")
    if taken is None:
        return None
    if taken.family == getattr(socket, "AF_UNIX", None):
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        size = struct.calcsize("3i")
        said = taken.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, uid, _ = struct.unpack("3i", said)
        return SocketPeer(taken.getsockname(), uid)
    certificate = transport.get_extra_info("peercert")
    if identity is not None and certificate:
        return TlsPeer.of(identity, certificate)
    try:
        return TcpPeer(taken.getpeername()[0])
    except OSError:  # gone already
        return None


def within(receive_timeout_s: float, send_timeout_s: float, most: int) -> type[Connection]:
    """Connections of one server, with these limits."""
    limits = {"receive_timeout_s": receive_timeout_s, "send_timeout_s": send_timeout_s}
    return type("Connection", (Connection,), {**limits, "most": most, "unused": {}})


def _answer(refusal: EdgeRefusal) -> bytes:
    """The whole answer as bytes."""
    ids = RequestIds(uuid7(), secrets.token_hex(16))
    enter(ids)
    response = problem_of(refusal, {"type": "http"})
    _log.info("request_unreadable", status=response.status_code, reason=refusal.reason)
    headers = {
        **SAFE_HEADERS,
        **response.headers,
        "X-Request-Id": ids.request_id,
        "Connection": "close",
    }
    status = HTTPStatus(response.status_code)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + bytes(response.body)
