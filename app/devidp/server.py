"""The development issuer over HTTP: metadata, keys, and a token endpoint (RFC 6749 §4.4)."""

import base64
import binascii
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote_plus

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.devidp.clients import DevClient
from app.devidp.issuer import DevIssuer

MAX_FORM_BYTES = 16 * 1024
_FORM = "application/x-www-form-urlencoded"


class _TokenError(Exception):
    """An error answer of RFC 6749 §5.2."""

    def __init__(self, error: str, description: str, *, status: int = 400) -> None:
        super().__init__(error)
        self.error = error
        self.description = description
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEndpoint:
    """What a client gets for its credentials."""

    issuer: DevIssuer
    clients: Mapping[str, DevClient]
    secret: str = field(repr=False)
    ttl_s: int

    async def token(self, request: Request) -> Response:
        """``POST /token``, grant ``client_credentials``; ``resource`` (RFC 8707) or ``audience``
        may name the client's audience and nothing else."""
        form = await _form(request)
        client = self._authenticate(request, form)
        if form.get("grant_type") != "client_credentials":
            raise _TokenError("unsupported_grant_type", "only client_credentials is served")
        for parameter in ("resource", "audience"):
            if form.get(parameter, client.audience) != client.audience:
                raise _TokenError("invalid_target", f"{client.client_id} may not reach that")
        asked = form["scope"].split(" ") if "scope" in form else sorted(client.scopes)
        if not client.scopes.issuperset(asked):
            raise _TokenError("invalid_scope", f"{client.client_id} may not have that scope")
        token = self.issuer.mint(
            client.client_id, client.client_id, asked, client.audience, self.ttl_s
        )
        return JSONResponse(
            {
                "access_token": token,
                "token_type": "Bearer",
                "expires_in": self.ttl_s,
                "scope": " ".join(asked),
            },
            headers={"cache-control": "no-store", "pragma": "no-cache"},
        )

    async def rotate(self, request: Request) -> Response:
        """``POST /rotate``: sign with a new key; ``keep_previous=false`` withdraws the old one."""
        form = await _form(request)
        self._authenticate(request, form)
        kid = self.issuer.rotate(keep_previous=form.get("keep_previous") != "false")
        return JSONResponse({"kid": kid}, headers={"cache-control": "no-store"})

    async def metadata(self, _: Request) -> Response:
        return JSONResponse(self.issuer.metadata())

    async def keys(self, _: Request) -> Response:
        return JSONResponse(self.issuer.jwks())

    def _authenticate(self, request: Request, form: Mapping[str, str]) -> DevClient:
        authorization = request.headers.get("authorization")
        if authorization is None:
            client_id, secret = form.get("client_id", ""), form.get("client_secret", "")
        elif "client_secret" in form:
            raise _TokenError("invalid_request", "credentials were sent in two ways")
        else:
            client_id, secret = _basic(authorization)
        good = hmac.compare_digest(secret.encode(), self.secret.encode())
        client = self.clients.get(client_id)
        if client is None or not good:
            raise _TokenError("invalid_client", "unknown client or wrong secret", status=401)
        return client


def create_app(
    issuer: DevIssuer,
    clients: Iterable[DevClient],
    *,
    secret: str,
    hosts: Iterable[str],
    ttl_s: int,
) -> ASGIApp:
    """The issuer as an ASGI application; ``hosts`` are the Host header values it answers to."""
    endpoint = TokenEndpoint(
        issuer=issuer,
        clients={client.client_id: client for client in clients},
        secret=secret,
        ttl_s=ttl_s,
    )
    app = Starlette(
        routes=[
            Route("/.well-known/openid-configuration", endpoint.metadata),
            Route("/.well-known/oauth-authorization-server", endpoint.metadata),
            Route("/jwks", endpoint.keys),
            Route("/token", endpoint.token, methods=["POST"]),
            Route("/rotate", endpoint.rotate, methods=["POST"]),
        ],
        exception_handlers={_TokenError: _error_answer},
    )
    return _OwnHostOnly(app, frozenset(host.lower() for host in hosts))


class _OwnHostOnly:
    """Answers only to its own loopback names, and to no web page.

    Loopback alone is no wall: a page in the user's browser reaches it too, directly (it sends
    Origin) or by a DNS name rebound to 127.0.0.1 (it sends that name as Host).
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent = [v.decode("latin-1").lower() for k, v in scope["headers"] if k == b"host"]
            if len(sent) != 1 or sent[0] not in self._hosts:
                await JSONResponse({"error": "misdirected_request"}, 421)(scope, receive, send)
                return
            if any(name == b"origin" for name, _ in scope["headers"]):
                await JSONResponse({"error": "access_denied"}, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _error_answer(_: Request, error: Exception) -> Response:
    assert isinstance(error, _TokenError)
    headers = {"cache-control": "no-store", "pragma": "no-cache"}
    if error.status == 401:
        headers["www-authenticate"] = 'Basic realm="development issuer"'
    body = {"error": error.error, "error_description": error.description}
    return JSONResponse(body, error.status, headers)


async def _form(request: Request) -> dict[str, str]:
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != _FORM:
        raise _TokenError("invalid_request", f"the body must be {_FORM}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise _TokenError("invalid_request", "the body is too large", status=413)
    try:
        pairs = parse_qsl(body.decode("utf-8"), strict_parsing=bool(body), max_num_fields=32)
    except ValueError as error:
        raise _TokenError("invalid_request", "the body is not a form") from error
    form = dict(pairs)
    if len(form) != len(pairs):
        raise _TokenError("invalid_request", "a parameter was sent twice")
    return form


def _basic(authorization: str) -> tuple[str, str]:
    scheme, _, value = authorization.partition(" ")
    try:
        if scheme.lower() != "basic":
            raise ValueError(scheme)
        decoded = base64.b64decode(value.strip(), validate=True).decode("utf-8")
    except (ValueError, binascii.Error) as error:
        raise _TokenError("invalid_client", "credentials cannot be read", status=401) from error
    client_id, _, secret = decoded.partition(":")
    return unquote_plus(client_id), unquote_plus(secret)
