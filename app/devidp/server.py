"""The development issuer over HTTP: metadata, keys, tokens, and the pages where people agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from authlib.oauth2 import OAuth2Error
from authlib.oauth2.rfc6749.errors import InvalidRequestError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.devidp import pages
from app.devidp.authority import Asked, Authority
from app.devidp.codes import is_page_code, user_code
from app.devidp.grants import CONFIDENTIAL
from app.devidp.people import Person, narrowed_to_nothing

MAX_FORM_BYTES = 16 * 1024
PAGES = frozenset(["/authorize", "/device", "/end_session"])
"""Where a browser may post the issuer's own forms."""
_FORM = "application/x-www-form-urlencoded"


class _Unreadable(Exception):
    """What was sent is no form, or asks for something twice."""

    def __init__(self, description: str, *, status: int = 400) -> None:
        super().__init__(description)
        self.description = description
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    authority: Authority
    secret: str = field(repr=False)

    async def metadata(self, _: Request) -> Response:
        return JSONResponse(self.authority.metadata())

    async def keys(self, _: Request) -> Response:
        return JSONResponse(self.authority.issuer.jwks())

    async def token(self, request: Request) -> Response:
        asked = _asked(request, await _form(request))
        return self.authority.create_token_response(asked)  # type: ignore[no-any-return]

    async def start_device(self, request: Request) -> Response:
        return await self._endpoint("device_authorization", request)

    async def revoke(self, request: Request) -> Response:
        return await self._endpoint("revocation", request)

    async def _endpoint(self, name: str, request: Request) -> Response:
        asked = _asked(request, await _form(request))
        return self.authority.create_endpoint_response(name, asked)  # type: ignore[no-any-return]

    async def rotate(self, request: Request) -> Response:
        """Sign with a new key; ``keep_previous=false`` withdraws the old one."""
        form = await _form(request)
        asked = _asked(request, form)
        try:
            self.authority.authenticate_client(asked, CONFIDENTIAL, "rotate")
        except OAuth2Error as error:
            return self.authority.handle_error_response(asked, error)  # type: ignore[no-any-return]
        kid = self.authority.issuer.rotate(keep_previous=form.get("keep_previous") != "false")
        return JSONResponse({"kid": kid}, headers={"cache-control": "no-store"})

    # ---- pages

    async def authorize(self, request: Request) -> Response:
        """Authorization code (RFC 6749 §4.1). The form is posted back to the same query."""
        try:
            asked = _asked(request, _pairs(request.url.query))
        except _Unreadable as error:
            return pages.say("This does not work", error.description, status=error.status)
        try:
            grant = self.authority.get_consent_grant(asked)
        except OAuth2Error as error:
            return self._refuse(asked, error)
        if request.method == "GET":
            return self._choose(asked)
        form = await _form(request)
        person = None
        if "deny" not in form:
            if not is_page_code(form.get("code", ""), self.secret):
                return self._choose(asked, wrong_code=True)
            person = self._person(form, asked.scope)
        login = self.authority.log_in(person, grant.client.client_id) if person else None
        return self.authority.create_authorization_response(  # type: ignore[no-any-return]
            asked, grant_user=login, grant=grant
        )

    def _choose(self, asked: Asked, *, wrong_code: bool = False) -> Response:
        back = urlsplit(asked.payload.redirect_uri)
        return pages.choose(
            self.authority.people.values(),
            client=asked.client.name,
            scope=asked.scope,
            action=f"/authorize?{urlsplit(asked.uri).query}",
            returns_to=f"{back.scheme}://{back.netloc}",
            wrong_code=wrong_code,
        )

    def _refuse(self, asked: Asked, error: OAuth2Error) -> Response:
        if not error.redirect_uri:
            return pages.say("This does not work", error.description, status=400)
        reply = self.authority.handle_error_response(asked, error)
        self.authority.name_itself(reply)
        return reply  # type: ignore[no-any-return]

    async def device(self, request: Request) -> Response:
        """Where a person lets a device in (RFC 8628 §3.3)."""
        try:
            sent = _pairs(request.url.query) if request.method == "GET" else await _form(request)
        except _Unreadable as error:
            return pages.say("This does not work", error.description, status=error.status)
        if "user_code" not in sent:
            return pages.ask_user_code()
        code = user_code(sent["user_code"])
        waiting = self.authority.remembered.device_of(code, self.authority.now_s())
        if waiting is None:
            return pages.ask_user_code(unknown=True)
        client = self.authority.query_client(waiting.client_id)
        assert client is not None, "it asked for the code"
        posted = request.method == "POST"
        if posted and "deny" in sent:
            waiting.denied = True
            return pages.say("Refused", "The device is told so. You can close this page.")
        if not posted or not is_page_code(sent.get("code", ""), self.secret):
            return pages.choose(
                self.authority.people.values(),
                client=client.name,
                scope=waiting.scope,
                action="/device",
                user_code=code,
                wrong_code=posted,
            )
        person = self._person(sent, waiting.scope)
        if person is None:
            waiting.denied = True
            return pages.say("Refused", "Nothing that was asked for is theirs to give.")
        waiting.scope = person.granted(waiting.scope)
        waiting.login = self.authority.log_in(person, client.client_id)
        return pages.say(
            f"Hello, {person.name}", "The device is logged in. You can close this page."
        )

    def _person(self, form: dict[str, str], scope: str) -> Person | None:
        """Who was picked, if they may give any of it."""
        person = self.authority.people.get(form.get("person", ""))
        if person is None or narrowed_to_nothing(scope, person.granted(scope)):
            return None
        return person

    async def end_session(self, request: Request) -> Response:
        """RP-initiated logout. No browser has a session here, so that without an ID token there
        is nothing to end."""
        try:
            sent = _pairs(request.url.query) if request.method == "GET" else await _form(request)
            ending = self.authority.validate_endpoint_request("end_session", _asked(request, sent))
        except (OAuth2Error, _Unreadable) as error:
            return pages.say("This does not work", error.description or "", status=400)
        if ending.needs_confirmation:
            text = "This issuer keeps no session of your browser: each login picks a person anew."
            return pages.say("Nothing to log out of", text)
        back: Response | None = self.authority.create_endpoint_response("end_session", ending)
        return back or pages.say("Logged out", "The login and its refresh tokens have ended.")


def create_app(authority: Authority, *, secret: str, hosts: Iterable[str]) -> ASGIApp:
    """The issuer as an ASGI application; ``hosts`` are the Host header values it answers to."""
    at = Endpoints(authority=authority, secret=secret)
    app = Starlette(
        routes=[
            Route("/.well-known/openid-configuration", at.metadata),
            Route("/.well-known/oauth-authorization-server", at.metadata),
            Route("/jwks", at.keys),
            Route("/token", at.token, methods=["POST"]),
            Route("/revoke", at.revoke, methods=["POST"]),
            Route("/device_authorization", at.start_device, methods=["POST"]),
            Route("/rotate", at.rotate, methods=["POST"]),
            Route("/authorize", at.authorize, methods=["GET", "POST"]),
            Route("/device", at.device, methods=["GET", "POST"]),
            Route("/end_session", at.end_session, methods=["GET", "POST"]),
            Route(pages.STYLE_PATH, pages.style),
        ],
        exception_handlers={_Unreadable: _unreadable},
    )
    return _OwnHostOnly(app, frozenset(host.lower() for host in hosts))


class _OwnHostOnly:
    """Answers only to its own loopback names, and to no web page but its own.

    Loopback alone is no wall: a page in the user's browser reaches it too, directly (it sends
    Origin) or by a DNS name rebound to 127.0.0.1 (it sends that name as Host).
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = _header(scope, b"host")
            if len(hosts) != 1 or hosts[0] not in self._hosts:
                await JSONResponse({"error": "misdirected_request"}, 421)(scope, receive, send)
                return
            own = [f"http://{hosts[0]}"] if scope["path"] in PAGES else []
            if any(origin not in own for origin in _header(scope, b"origin")):
                await JSONResponse({"error": "access_denied"}, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _header(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]


async def _unreadable(_: Request, error: Exception) -> Response:
    assert isinstance(error, _Unreadable)
    body = {"error": InvalidRequestError.error, "error_description": error.description}
    headers = {"cache-control": "no-store", "pragma": "no-cache"}
    return JSONResponse(body, error.status, headers)


def _asked(request: Request, data: dict[str, str]) -> Asked:
    return Asked(request.method, str(request.url), request.headers, data)


async def _form(request: Request) -> dict[str, str]:
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != _FORM:
        raise _Unreadable(f"the body must be {_FORM}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise _Unreadable("the body is too large", status=413)
    try:
        text = body.decode("utf-8")
    except ValueError as error:
        raise _Unreadable("the body is not a form") from error
    return _pairs(text)


def _pairs(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(text, strict_parsing=bool(text), max_num_fields=32)
    except ValueError as error:
        raise _Unreadable("the parameters cannot be read") from error
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Unreadable("a parameter was sent twice")
    return found
