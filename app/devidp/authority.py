"""The authorization server: Authlib's, with this issuer's clients, people, keys and memory."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote_plus

from authlib.oauth2.rfc6749 import (
    AuthorizationServer,
    InvalidClientError,
    InvalidRequestError,
    OAuth2Request,
)
from authlib.oauth2.rfc6749.requests import BasicOAuth2Payload
from authlib.oauth2.rfc6750 import BearerTokenGenerator
from starlette.responses import Response

from app.devidp.clients import GRANTS, IDENTITY_SCOPES, DevClient
from app.devidp.grants import (
    CodeGrant,
    Credentials,
    DeviceGrant,
    DeviceStart,
    EndSession,
    IdToken,
    NamesItself,
    Proof,
    Refresh,
    Revocation,
)
from app.devidp.issuer import DevIssuer
from app.devidp.people import Person, audience_scopes
from app.devidp.remembered import Login, RefreshToken, Remembered, keep

REFRESH_TTL_S = 30 * 24 * 3600


class Asked(OAuth2Request):  # type: ignore[misc]
    """A request as Authlib reads it; ``data``: each parameter once."""

    def __init__(self, method: str, uri: str, headers: Any, data: dict[str, str]) -> None:
        super().__init__(method, uri, headers=headers)
        self.payload = BasicOAuth2Payload(data)

    @property
    def form(self) -> dict[str, str]:
        return self.payload.data  # type: ignore[no-any-return]


class Reply(Response):
    """``location`` is for Authlib, which adds to it."""

    @property
    def location(self) -> str | None:
        return self.headers.get("location")

    @location.setter
    def location(self, location: str) -> None:
        self.headers["location"] = location


class Authority(AuthorizationServer):  # type: ignore[misc]
    """Knows who may have which token; nothing of HTTP but Authlib's idea of it."""

    def __init__(
        self,
        issuer: DevIssuer,
        clients: Iterable[DevClient],
        people: Iterable[Person],
        *,
        secret: str,
        ttl_s: int,
        device_interval_s: int,
    ) -> None:
        super().__init__()
        self.issuer = issuer
        self.people = {person.subject: person for person in people}
        self.ttl_s = ttl_s
        self.device_interval_s = device_interval_s
        self.remembered = Remembered()
        self._clients = {client.client_id: client for client in clients}
        self._secret = secret
        self.register_token_generator(
            "default", BearerTokenGenerator(self._access_token, _refresh_token, ttl_s)
        )
        self.register_client_auth_method("client_secret_basic", self._by_header)
        self.register_client_auth_method("client_secret_post", self._by_form)
        id_token = IdToken(self)
        self.register_grant(Credentials)
        self.register_grant(CodeGrant, [Proof(required=True), id_token])
        self.register_grant(Refresh, [id_token])
        self.register_grant(DeviceGrant, [id_token])
        self.register_endpoint(DeviceStart(self))
        self.register_endpoint(Revocation(self))
        self.register_endpoint(EndSession(self))
        self._naming = NamesItself(self)

    def now_s(self) -> float:
        return self.issuer.now_s()

    def metadata(self) -> dict[str, Any]:
        """RFC 8414, which OpenID Connect Discovery shares; nothing that is not served."""
        at = self.issuer.issuer
        scopes = {scope for client in self._clients.values() for scope in client.scopes}
        return {
            **self.issuer.metadata(),
            "authorization_endpoint": f"{at}/authorize",
            "device_authorization_endpoint": f"{at}/device_authorization",
            "revocation_endpoint": f"{at}/revoke",
            "end_session_endpoint": f"{at}/end_session",
            "scopes_supported": sorted(scopes | IDENTITY_SCOPES),
            "response_types_supported": ["code"],
            "response_modes_supported": ["query"],
            "grant_types_supported": list(GRANTS),
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": [self.issuer.algorithm],
            "token_endpoint_auth_methods_supported": [
                "client_secret_basic",
                "client_secret_post",
                "none",
            ],
            "revocation_endpoint_auth_methods_supported": [
                "client_secret_basic",
                "client_secret_post",
                "none",
            ],
            "code_challenge_methods_supported": ["S256"],
            "authorization_response_iss_parameter_supported": True,
            "prompt_values_supported": ["none", "login", "select_account"],
            "claims_supported": [
                "iss",
                "sub",
                "aud",
                "exp",
                "iat",
                "auth_time",
                "nonce",
                "sid",
                "name",
                "preferred_username",
                "groups",
            ],
            "claims_parameter_supported": False,
            "request_parameter_supported": False,
            "request_uri_parameter_supported": False,
        }

    def log_in(self, person: Person, client_id: str) -> Login:
        """A person agrees to a client, now."""
        login = Login(
            sid=secrets.token_urlsafe(12),
            person=person,
            client_id=client_id,
            at=int(self.now_s()),
        )
        keep(self.remembered.logins, login.sid, login)
        return login

    def name_itself(self, reply: Reply) -> None:
        """In an answer that Authlib gives by another way than its authorization response."""
        self._naming.add_issuer_parameter(self, reply)

    # ---- what Authlib asks of a server

    def query_client(self, client_id: str | None) -> DevClient | None:
        return self._clients.get(client_id) if client_id else None

    def save_token(self, token: Mapping[str, Any], request: Any) -> None:
        """Access tokens are not kept: whoever judges one asks nobody."""
        if "refresh_token" not in token:
            return
        # A narrower token narrows nothing for later ones (RFC 6749 §6), nor makes them live on.
        before: RefreshToken | None = request.refresh_token
        keep(
            self.remembered.refresh_tokens,
            token["refresh_token"],
            RefreshToken(
                login=request.user,
                scope=before.scope if before else token.get("scope", ""),
                expires_at=before.expires_at if before else self.now_s() + REFRESH_TTL_S,
            ),
        )

    def create_oauth2_request(self, request: Asked) -> Asked:
        return request

    def handle_response(self, status: int, body: Any, headers: Iterable[tuple[str, str]]) -> Reply:
        reply = Reply(json.dumps(body) if isinstance(body, dict) else body, status)
        for name, value in headers:
            reply.headers[name] = value
        reply.headers["cache-control"] = "no-store"
        return reply

    def send_signal(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Nobody listens."""

    def _access_token(self, *, client: DevClient, user: Login | None, scope: str, **_: Any) -> str:
        if user is None:
            return self.issuer.mint(
                client.client_id, client.client_id, scope.split(), client.audience, self.ttl_s
            )
        return self.issuer.mint(
            user.person.subject,
            client.client_id,
            audience_scopes(user.person.granted(scope)),
            client.audience,
            self.ttl_s,
            auth_time=user.at,
            groups=[user.person.group],
        )

    def _by_header(self, _: Any, request: Asked) -> DevClient | None:
        authorization = request.headers.get("authorization")
        if authorization is None:
            return None
        if "client_secret" in request.form:
            raise InvalidRequestError("Credentials were sent in two ways.")
        client_id, secret = _basic(authorization)
        return self._with_secret(client_id, secret)

    def _by_form(self, _: Any, request: Asked) -> DevClient | None:
        if "client_secret" not in request.form:
            return None
        return self._with_secret(request.form.get("client_id", ""), request.form["client_secret"])

    def _with_secret(self, client_id: str, secret: str) -> DevClient:
        good = hmac.compare_digest(secret.encode(), self._secret.encode())
        client = self.query_client(client_id)
        if client is None or not client.confidential or not good:
            raise _unknown()
        return client


def _refresh_token(**_: Any) -> str:
    return secrets.token_urlsafe(32)


def _basic(authorization: str) -> tuple[str, str]:
    """RFC 6749 §2.3.1: both are escaped as in a form."""
    scheme, _, value = authorization.partition(" ")
    try:
        if scheme.lower() != "basic":
            raise ValueError(scheme)
        decoded = base64.b64decode(value.strip(), validate=True).decode("utf-8")
    except (ValueError, binascii.Error) as error:
        raise _unknown() from error
    client_id, _, secret = decoded.partition(":")
    return unquote_plus(client_id), unquote_plus(secret)


def _unknown() -> InvalidClientError:
    return InvalidClientError("Unknown client, or wrong secret.", status_code=401)
