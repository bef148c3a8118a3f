"""What the doubles of engines' servers have in common: a real HTTP server on a free port, calls
that are remembered, and faults that are arranged for.

    double.url
    double.calls                      # (method, path, query, body) of each call, in order
    double.next("/pause", Hang())     # what happens to the next call of that path
"""

from __future__ import annotations

import asyncio
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.enginekit.client import until

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Answer:
    """Instead of carrying it out."""

    status: int = 500
    body: Any = None


@dataclass(frozen=True)
class After:
    """Carried out, and then answered like that."""

    status: int = 200
    body: Any = None


class Hang:
    """Carried out, and never answered."""


class Die:
    """The engine ends in the midst of it, and the call is never answered."""


Fault = Answer | After | Hang | Die


class EngineDouble(ABC):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, bytes]] = []
        self.url = ""
        self.served: asyncio.Task[None] | None = None
        self._faults: dict[str, list[Fault]] = {}
        self._server: uvicorn.Server | None = None
        self._port = 0

    def next(self, path: str, *faults: Fault) -> None:
        self._faults.setdefault(path, []).extend(faults)

    def bodies(self, path: str) -> list[Any]:
        return [json.loads(body) for _, called, _, body in self.calls if called == path and body]

    # ---- for each kind of engine ----

    @abstractmethod
    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler; asked at each start."""

    @abstractmethod
    async def die(self) -> None:
        """The engine ends; the server may stay or not."""

    def refused(self, request: Request, path: str) -> Response | None:
        """Before anything else: for want of a key."""
        del request, path
        return None

    async def carried_out(self, handler: Handler, request: Request) -> Response:
        return await handler(request)

    # ---- serving ----

    async def start(self, port: int | None = None) -> None:
        """At that port; else at the one it had, or a free one."""
        at = self._port if port is None else port
        listening = socket.create_server(("127.0.0.1", at))
        self._port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        config = uvicorn.Config(
            self._app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self.served = asyncio.create_task(self._server.serve(sockets=[listening]))
        server = self._server
        await until(lambda: server.started)

    async def stop(self) -> None:
        """The port closes, and connections break."""
        server, self._server = self._server, None
        if server is not None and self.served is not None:
            server.should_exit = server.force_exit = True
            await self.served

    async def vanish(self) -> None:
        """The same at once, with calls under way: as of a process that is killed."""
        if self._server is not None:
            for listening in self._server.servers:
                listening.close()
            for connection in list(self._server.server_state.connections):
                transport: asyncio.Transport | None = getattr(connection, "transport", None)
                if transport is not None:
                    transport.abort()
        await self.stop()

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route(path, self._around(path, handler), methods=[method])
                for method, path, handler in self.routes()
            ],
            exception_handlers={
                404: lambda _, __: JSONResponse({"detail": "Not Found"}, 404),
                405: lambda _, __: JSONResponse({"detail": "Method Not Allowed"}, 405),
            },
        )

    def _around(self, path: str, handler: Handler) -> Handler:
        async def serve(request: Request) -> Response:
            self.calls.append((request.method, path, request.url.query, await request.body()))
            refusal = self.refused(request, path)
            if refusal is not None:
                return refusal
            waiting = self._faults.get(path)
            fault = waiting.pop(0) if waiting else None
            if isinstance(fault, Answer):
                return plain(fault)
            if isinstance(fault, Die):
                await self.die()
                await asyncio.Event().wait()
            response = await self.carried_out(handler, request)
            if isinstance(fault, Hang):
                await asyncio.Event().wait()
            return plain(fault) if isinstance(fault, After) else response

        return serve


def plain(fault: Answer | After) -> Response:
    if fault.body is None:
        return Response(status_code=fault.status)
    return JSONResponse(fault.body, fault.status)
