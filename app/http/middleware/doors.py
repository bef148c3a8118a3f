"""Requests that no route should see: for another host, with a token in the URL, too many."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import ChadburnError
from app.http.problems import problem_of
from app.http.refusals import (
    BodyTooLarge,
    BodyTooSlow,
    HostRefused,
    MalformedRequest,
    Overloaded,
    TokenInQuery,
)

PROBES = frozenset({"/healthz", "/readyz"})
"""Asked by address by whatever supervises the process, and to be answered when all is busy."""

_UPDATE = re.compile(
    r"/v1/engines/[^/]+/update-weights|/compat/vllm/[^/]+/update_weights"
    r"|/compat/sglang/[^/]+/update_weights_from_(distributed|tensor)"
)
_TOKEN_NAMES = frozenset(
    {"access_token", "token", "bearer", "bearer_token", "authorization", "auth", "id_token", "jwt"}
)


class Doors:
    """`allowed_hosts`: names without port. Loopback addresses count as one name, `localhost`.
    `max_update_bytes`: of updates of weights, whose tensors may come in the body; nobody's is read
    who may not give one. `max_bodies_bytes`: of all bodies that are held at once.
    `max_concurrent`: requests; of these `max_changing` may be other than reads, so that reading
    goes on when orders pile up."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Iterable[str],
        max_body_bytes: int,
        max_update_bytes: int,
        max_bodies_bytes: int,
        max_concurrent: int,
        max_changing: int,
        receive_timeout_s: float,
    ) -> None:
        self._app = app
        self._hosts = frozenset(map(_canonical, allowed_hosts))
        self._max_body_bytes = max_body_bytes
        self._max_update_bytes = max(max_update_bytes, max_body_bytes)
        self._max_bodies_bytes = max(max_bodies_bytes, self._max_update_bytes)
        self._max_concurrent = max_concurrent
        self._max_changing = max_changing
        self._receive_timeout_s = receive_timeout_s
        self._under_way = 0
        self._changing = 0
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        probe = scope["path"] in PROBES
        refusal = self._refusal(scope, probe=probe)
        if refusal is not None:
            await problem_of(refusal, scope)(scope, receive, send)
            return
        update = _UPDATE.fullmatch(scope["path"]) is not None
        limit = self._max_update_bytes if update else self._max_body_bytes
        body = _Body(self, receive, Headers(scope=scope), limit, self._receive_timeout_s)
        try:
            if probe:
                await self._app(scope, body.read, send)
                return
            slot = _Slot(self, changing=_changes(scope))
            scope.setdefault("state", {})["place"] = slot
            try:
                await self._app(scope, body.read, slot.watching(send))
            finally:
                slot.free()
        finally:
            body.let_go()

    def _refusal(self, scope: Scope, *, probe: bool) -> ChadburnError | None:
        hosts = Headers(scope=scope).getlist("host")
        if not probe and len(hosts) != 1:
            return MalformedRequest("One Host header is needed.")
        if not probe and host_named(hosts[0]) not in self._hosts:
            return HostRefused()
        query = scope["query_string"].decode("latin-1")
        if any(name.lower() in _TOKEN_NAMES for name, _ in parse_qsl(query, True)):
            return TokenInQuery()
        if not probe and self._under_way >= self._max_concurrent:
            return Overloaded()
        if _changes(scope) and self._changing >= self._max_changing:
            return Overloaded("As many orders and changes are under way as may be.")
        return None

    def enter(self, *, changing: bool) -> None:
        self._under_way += 1
        self._changing += changing

    def leave(self, *, changing: bool) -> None:
        self._under_way -= 1
        self._changing -= changing

    def hold(self, size: int) -> bool:
        """Keep so much more of bodies; False: there is no room."""
        if self._held_bytes + size > self._max_bodies_bytes:
            return False
        self._held_bytes += size
        return True

    def drop(self, size: int) -> None:
        self._held_bytes -= size


class _Slot:
    """One place among the concurrent requests. A stream gives it back when it begins, and a caller
    who waits for an operation's end as long as that lasts: both have limits of their own."""

    def __init__(self, doors: Doors, *, changing: bool) -> None:
        self._doors = doors
        self._changing = changing
        self._held = True
        doors.enter(changing=changing)

    def free(self) -> None:
        if self._held:
            self._held = False
            self._doors.leave(changing=self._changing)

    def watching(self, send: Send) -> Send:
        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                kind = Headers(raw=message.get("headers", [])).get("content-type", "")
                if kind.startswith("text/event-stream"):
                    self.free()
            await send(message)

        return pass_on


class _Body:
    """What is received of one request's body. It is held until the request is over."""

    def __init__(
        self, doors: Doors, receive: Receive, headers: Headers, limit: int, timeout_s: float
    ) -> None:
        announced = headers.get("content-length", "")
        self._doors = doors
        self._receive = receive
        self._limit = limit
        self._too_large = announced.isdigit() and int(announced) > limit
        self._timeout_s = timeout_s
        self._ends_at: float | None = None
        self._taken = 0
        self._whole = False

    async def read(self) -> Message:
        """Raises BodyTooLarge, BodyTooSlow and Overloaded to whoever reads the body, so that who
        may not is told so first. The time is for all of it, from the first look; a sender of one
        byte at a time would hold a place for as long as it liked."""
        if self._too_large:
            raise BodyTooLarge(self._limit)
        if self._whole:
            return await self._receive()  # what comes now is that the client leaves, if ever
        if self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._ends_at):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow from None
        if message["type"] == "http.request":
            self._whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            if self._taken + size > self._limit:
                raise BodyTooLarge(self._limit)
            if not self._doors.hold(size):
                raise Overloaded("As much is being received as may be at once.")
            self._taken += size
        return message

    def let_go(self) -> None:
        self._doors.drop(self._taken)
        self._taken = 0


def _changes(scope: Scope) -> bool:
    return scope["method"] not in ("GET", "HEAD")


def host_named(header: str) -> str:
    """Of a Host header, without the port. All loopback addresses are `localhost`."""
    return _canonical(_without_port(header))


def _without_port(host: str) -> str:
    """Empty, which is nobody's name, for brackets that are not as they should be."""
    if host.startswith("["):
        address, closing, port = host[1:].partition("]")
        return address if closing and (not port or port.startswith(":")) else ""
    return host.partition(":")[0] if host.count(":") <= 1 else host


def _canonical(host: str) -> str:
    host = host.strip("[]").rstrip(".").lower()
    try:
        return "localhost" if ipaddress.ip_address(host).is_loopback else host
    except ValueError:
        return host
