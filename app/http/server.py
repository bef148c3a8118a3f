"""uvicorn, with an end that open streams hear of first."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from app.http.closing import Closing
from app.http.connection import Connection, within
from app.http.listeners import TlsListener

_BACKLOG = 2048
_OTHER_FILES = 256  # connections to databases and engines, files, what is being accepted


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, _, _, address = found[0]
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is: without
    # it each answer on a connection in use waits some 40 ms for an acknowledgement.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def most_connections(wanted: int) -> int:
    """How many connections of clients this process can hold: as many as are wanted, if it may have
    so many files open and some besides. It lets itself have as many as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted + _OTHER_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - _OTHER_FILES))


class GatewayServer(uvicorn.Server):
    """The lifespan is entered here and not by uvicorn, so that what it raises at the start
    reaches whoever called `serve`.

    At the end streams are told before connections are asked to close: an open stream would
    otherwise hold the process until its grace is over.

    `tls`: listeners beside the sockets that `serve` is given.
    """

    def __init__(
        self,
        app: FastAPI,
        closing: Closing,
        *,
        grace_s: float,
        keep_alive_s: int,
        receive_timeout_s: float,
        send_timeout_s: float = 30.0,
        max_connections: int = 4096,
        on_ready: Callable[[], None],
        tls: Sequence[TlsListener] = (),
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                http=within(receive_timeout_s, send_timeout_s, most_connections(max_connections)),
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # the application's own layer, with its own list
                server_header=False,
                timeout_graceful_shutdown=max(1, round(grace_s)),
                timeout_keep_alive=keep_alive_s,
            )
        )
        self._app = app
        self._closing = closing
        self._on_ready = on_ready
        self._tls = tuple(tls)
        self._held = AsyncExitStack()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        lifespan = self._app.router.lifespan_context(self._app)
        state = await self._held.enter_async_context(lifespan)
        self.lifespan.state.update(state or {})
        await super().startup(sockets)
        for listener in self._tls:
            listener.start(self._connection)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing.set()
        try:
            for listener in self._tls:
                await listener.stop()
            await super().shutdown(sockets)
        finally:
            await self._held.aclose()

    def _connection(self) -> Connection:
        """As uvicorn makes them for the sockets that it listens at itself."""
        make = cast("type[Connection]", self.config.http_protocol_class)
        return make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """An asked-for end is a clean one: unlike uvicorn's, it is not raised again at the end,
        so the process exits with 0. A second interrupt waits for nothing."""
        del frame
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
