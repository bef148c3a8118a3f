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

_UPDATE = re.compile(r"/v1/engines/[^/]+/update-weights")
_TOKEN_NAMES = frozenset(
    {"access_token", "token", "bearer", "bearer_token", "authorization", "auth", "id_token", "jwt"}
)


class Doors:
    """`allowed_hosts`: names without port. Loopback addresses count as one name, `localhost`.
    `max_update_bytes`: of updates of weights, whose tensors may come in the body; nobody's is read
    who may not give one."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Iterable[str],
        max_body_bytes: int,
        max_update_bytes: int,
        max_concurrent: int,
        receive_timeout_s: float,
    ) -> None:
        self._app = app
        self._hosts = frozenset(map(_canonical, allowed_hosts))
        self._max_body_bytes = max_body_bytes
        self._max_update_bytes = max(max_update_bytes, max_body_bytes)
        self._max_concurrent = max_concurrent
        self._receive_timeout_s = receive_timeout_s
        self._under_way = 0

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
        limited = _limited(receive, Headers(scope=scope), limit, self._receive_timeout_s)
        if probe:
            await self._app(scope, limited, send)
            return
        slot = _Slot(self)
        try:
            await self._app(scope, limited, slot.watching(send))
        finally:
            slot.free()

    def _refusal(self, scope: Scope, *, probe: bool) -> ChadburnError | None:
        hosts = Headers(scope=scope).getlist("host")
        if not probe and len(hosts) != 1:
            return MalformedRequest("One Host header is needed.")
        if not probe and _canonical(_without_port(hosts[0])) not in self._hosts:
            return HostRefused()
        query = scope["query_string"].decode("latin-1")
        if any(name.lower() in _TOKEN_NAMES for name, _ in parse_qsl(query, True)):
            return TokenInQuery()
        if not probe and self._under_way >= self._max_concurrent:
            return Overloaded()
        return None

    def enter(self) -> None:
        self._under_way += 1

    def leave(self) -> None:
        self._under_way -= 1


class _Slot:
    """One place among the concurrent requests. A stream gives it back when it begins, because
    streams last, and have a limit of their own."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._held = True
        doors.enter()

    def free(self) -> None:
        if self._held:
            self._held = False
            self._doors.leave()

    def watching(self, send: Send) -> Send:
        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                kind = Headers(raw=message.get("headers", [])).get("content-type", "")
                if kind.startswith("text/event-stream"):
                    self.free()
            await send(message)

        return pass_on


def _limited(receive: Receive, headers: Headers, limit: int, timeout_s: float) -> Receive:
    """Raises BodyTooLarge and BodyTooSlow to whoever reads the body, so that who may not is told
    so first. `timeout_s`: for all of it, from the first look; a sender of one byte at a time would
    hold a place for as long as it liked."""
    announced = headers.get("content-length", "")
    too_large = announced.isdigit() and int(announced) > limit
    taken = 0
    ends_at: float | None = None
    whole = False

    async def read() -> Message:
        nonlocal taken, ends_at, whole
        if too_large:
            raise BodyTooLarge(limit)
        if whole:
            return await receive()  # what comes now is that the client leaves, if ever
        if ends_at is None:
            ends_at = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(ends_at):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlow from None
        if message["type"] == "http.request":
            whole = not message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > limit:
                raise BodyTooLarge(limit)
        return message

    return read


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") <= 1 else host


def _canonical(host: str) -> str:
    host = host.strip("[]").rstrip(".").lower()
    try:
        return "localhost" if ipaddress.ip_address(host).is_loopback else host
    except ValueError:
        return host
