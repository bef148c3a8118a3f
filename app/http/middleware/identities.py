"""Requests to compatible endpoints: what they show besides tokens, and nothing of it left in them.

A secret that stands in the path is taken out before anything else sees the path, so that routes,
log, audit, figures and problems have none to repeat. Whether it is good is asked here too, as who
guesses has to be counted; who the caller is, is for `Need` to say, as of all callers.
"""

from __future__ import annotations

import re
from typing import Any, cast
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.auth.identities.known import Showing
from app.auth.identities.secret_files import digest_of
from app.auth.requires import Gate
from app.auth.tokens.errors import TokenRefused
from app.domain.errors import UnknownEngine
from app.http.middleware.doors import host_named
from app.http.problems import problem_of
from app.http.records import record_refusal
from app.http.rooms import Rooms

_BELOW = re.compile(r"/*compat(/.*)?", re.DOTALL | re.IGNORECASE)
_ENGINE = re.compile(r"(/compat/[^/]+/)([^/~]+)(?:~([^/]*))?(/.*)?", re.DOTALL)
_SECRET = re.compile(r"~[^/]*")
_NO_ENGINE = "~"
"""No engine can be called so: their ids have letters, digits and hyphens."""
_PASSED_ON = re.compile(r"forwarded|via|x-real-ip|x-forwarded-.*")
_OF_BROWSERS = ("origin", "sec-fetch-site")


class SecretUnknown(TokenRefused):
    """How a wrong secret is counted. Its caller is told of an engine that is not there."""

    reason = "SECRET_PATH_UNKNOWN"


class CompatIdentities:
    """Leaves in the request's state what it shows, as `shown`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _BELOW.fullmatch(scope["path"]):
            refused = await self._shown(scope)
            if refused is not None:
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _shown(self, scope: Scope) -> ASGIApp | None:
        """The answer, where there is no more to be asked."""
        path = _ENGINE.fullmatch(scope["path"])
        if path is None:
            _set_path(scope, _SECRET.sub("", scope["path"]))
            return None
        before, engine, secret, behind = path.groups()
        headers = Headers(scope=scope)
        shown = Showing(
            peer=scope["state"].get("peer"),
            digest=None if secret is None else digest_of(secret),
            browser=any(name in headers for name in _OF_BROWSERS),
            direct=_is_direct(headers),
        )
        scope["state"]["shown"] = shown
        if secret is None:
            return None
        _set_path(scope, f"{before}{engine}{behind or ''}")
        gate = cast("Gate | None", scope["state"].get("gate"))
        try:
            if gate is None or gate.identities is None:
                raise UnknownEngine("there is no engine of that id")
            gate.identities.refuse_unknown(shown)
        except UnknownEngine:
            _set_path(scope, f"{before}{_NO_ENGINE}{behind or ''}")
            return await _counted(Request(scope))
        return None


async def _counted(request: Request) -> ASGIApp | None:
    rooms: Rooms | None = getattr(request.state, "rooms", None)
    if rooms is None:
        return None
    error = SecretUnknown()
    answer = rooms.allowances.refused(request, error)
    await record_refusal(request, error, folded=answer is not error)
    return None if answer is error else problem_of(answer, request.scope)


def _set_path(scope: Scope, path: str) -> None:
    scope["path"] = path
    scope["raw_path"] = quote(path, safe="/!$&'()*+,;=:@~").encode("ascii")


def _is_direct(headers: Any) -> bool:
    hosts = headers.getlist("host")
    passed_on = any(_PASSED_ON.fullmatch(name) for name in headers)
    return not passed_on and [host_named(host) for host in hosts] == ["localhost"]
