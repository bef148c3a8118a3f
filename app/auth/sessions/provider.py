"""What the gateway says to an issuer at which people log in: its metadata, and its token endpoint.

The protocol is Authlib's; where its requests go, how long and how large an answer may be, and what
is sent as a secret is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote_plus, urlencode

import httpx2
from authlib.integrations.httpx_client import AsyncOAuth2Client, OAuthError
from authlib.oauth2.auth import encode_client_secret_basic
from authlib.oauth2.rfc7523 import PrivateKeyJWT
from joserfc.jwk import ECKey, RSAKey

from app.auth.sessions.clients import LoginAuth, LoginClient
from app.auth.sessions.errors import LoginFailed
from app.auth.tokens.errors import IssuerUnavailable
from app.auth.tokens.fetch import (
    MAX_DOCUMENT_BYTES,
    FetchFailed,
    NotServed,
    address_in,
    discovery_urls,
    fetch_document,
)
from app.auth.tokens.strict_json import json_object

log = logging.getLogger(__name__)

_ASSERTION_S = 60
_AUTH_METHODS = {
    LoginAuth.BASIC: "client_secret_basic",
    LoginAuth.POST: "client_secret_post",
    LoginAuth.PRIVATE_KEY_JWT: "private_key_jwt",
    LoginAuth.NONE: "none",
}


class GrantRefused(Exception):
    """The issuer's token endpoint says no to a code or a refresh token. `error`: RFC 6749 5.2."""

    def __init__(self, error: str) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderTimings:
    """In seconds."""

    metadata_ttl_s: float = 600.0
    metadata_deadline_s: float = 5.0
    token_deadline_s: float = 10.0
    revocation_deadline_s: float = 3.0
    backoff_s: float = 5.0
    """After a failure to get the metadata; until then the answer is immediate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Of the issuer's metadata. `names_itself`: it puts `iss` into its answers (RFC 9207)."""

    authorization: str
    token: str
    end_session: str | None
    revocation: str | None
    names_itself: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedTokens:
    """An answer of the token endpoint, read and not yet judged. The access token is a plain one."""

    access_token: str
    refresh_token: str | None
    id_token: str | None


class Provider:
    """One issuer. Raises IssuerUnavailable from every method that asks it something."""

    def __init__(
        self,
        client: LoginClient,
        *,
        http: httpx2.AsyncClient,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
        redirect_uri: str,
        timings: ProviderTimings,
    ) -> None:
        self.client = client
        self._http = http
        self._now = now
        self._monotonic = monotonic
        self._redirect_uri = redirect_uri
        self._timings = timings
        self._endpoints: Endpoints | None = None
        self._fetched_at = float("-inf")
        self._retry_at = float("-inf")

    async def endpoints(self) -> Endpoints:
        """Old ones while the issuer is down."""
        now = self._monotonic()
        if now - self._fetched_at < self._timings.metadata_ttl_s and self._endpoints is not None:
            return self._endpoints
        if now >= self._retry_at:
            # Before the question: who comes meanwhile asks no second time.
            self._retry_at = now + self._timings.backoff_s
            try:
                async with asyncio.timeout(self._timings.metadata_deadline_s):
                    self._endpoints = await self._discover()
                self._fetched_at = self._monotonic()
                self._retry_at = float("-inf")
            except (FetchFailed, TimeoutError) as error:
                log.warning("no metadata of %s: %s", self.client.issuer, str(error) or "no answer")
        if self._endpoints is None:
            raise self._unavailable()
        return self._endpoints

    async def authorization_url(self, *, state: str, nonce: str, code_verifier: str) -> str:
        """Where the browser goes to log in: authorization code with PKCE, S256 and nothing less."""
        endpoints = await self.endpoints()
        async with self._asking() as asking:
            url, _ = asking.create_authorization_url(
                endpoints.authorization,
                state=state,
                nonce=nonce,
                code_verifier=code_verifier,
                scope=self.client.asked_scope,
                resource=self.client.resource,
                **self.client.parameters,
            )
        return str(url)

    async def exchange(self, code: str, code_verifier: str) -> GrantedTokens:
        """Raises GrantRefused, LoginFailed."""
        return await self._ask(
            lambda asking, url: asking.fetch_token(
                url,
                grant_type="authorization_code",
                code=code,
                code_verifier=code_verifier,
                **self._resource,
            )
        )

    async def refresh(self, refresh_token: str) -> GrantedTokens:
        """Raises GrantRefused, LoginFailed. Where it raises IssuerUnavailable the issuer may have
        given out others all the same."""
        return await self._ask(
            lambda asking, url: asking.refresh_token(
                url, refresh_token=refresh_token, **self._resource
            )
        )

    async def revoke(self, refresh_token: str) -> None:
        """Tell the issuer that nobody will use it again (RFC 7009), if it wants to know. Never
        raises: what it was good for here is gone already."""
        try:
            endpoints = await self.endpoints()
            if endpoints.revocation is None:
                return
            async with (
                asyncio.timeout(self._timings.revocation_deadline_s),
                self._asking() as asking,
            ):
                await asking.revoke_token(
                    endpoints.revocation,
                    token=refresh_token,
                    token_type_hint="refresh_token",  # noqa: S106 - a kind
                )
        except (IssuerUnavailable, httpx2.HTTPError, OSError, ValueError, TimeoutError) as error:
            log.info("no token revoked at %s: %s", self.client.issuer, type(error).__name__)

    async def end_session_url(self, id_token: str, *, return_to: str) -> str | None:
        """Where the browser goes to log out there too (OpenID Connect RP-Initiated Logout 1.0);
        None: the issuer does not offer it."""
        endpoint = (await self.endpoints()).end_session
        if endpoint is None:
            return None
        query = urlencode(
            {
                "id_token_hint": id_token,
                "client_id": self.client.client_id,
                "post_logout_redirect_uri": return_to,
            }
        )
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{query}"

    @property
    def _resource(self) -> dict[str, str]:
        return {} if self.client.resource is None else {"resource": self.client.resource}

    async def _ask(self, ask: Callable[[AsyncOAuth2Client, str], Any]) -> GrantedTokens:
        endpoints = await self.endpoints()
        try:
            async with asyncio.timeout(self._timings.token_deadline_s), self._asking() as asking:
                return _granted(await ask(asking, endpoints.token))
        except OAuthError as error:
            # Its description is the issuer's text, which goes nowhere.
            raise GrantRefused(error_code(error.error)) from None
        except (httpx2.HTTPError, FetchFailed, OSError, TimeoutError) as error:
            log.warning("token endpoint of %s: %s", self.client.issuer, type(error).__name__)
            raise self._unavailable() from error
        except ValueError as error:
            raise LoginFailed("the token endpoint's answer is no JSON object") from error

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[AsyncOAuth2Client]:
        """A client for one exchange: Authlib's keeps what it was given last."""
        client = self.client
        secret: Any = None
        if client.secret_file is not None:
            secret = (await asyncio.to_thread(client.secret_file.read_text, "utf-8")).strip()
        if client.auth is LoginAuth.PRIVATE_KEY_JWT:
            secret = private_key(secret, client.key_algorithm)
        async with AsyncOAuth2Client(
            client_id=client.client_id,
            client_secret=secret,
            token_endpoint_auth_method=_AUTH_METHODS[client.auth],
            revocation_endpoint_auth_method=_AUTH_METHODS[client.auth],
            code_challenge_method="S256",
            redirect_uri=self._redirect_uri,
            transport=_Within(self._http),
            trust_env=False,
        ) as asking:
            asking.register_client_auth_method(("client_secret_basic", _escaped_basic))
            asking.register_client_auth_method(
                PrivateKeyJWT(
                    # Authlib's own would be good for an hour.
                    claims={"exp": int(self._now().timestamp()) + _ASSERTION_S},
                    headers={} if client.key_id is None else {"kid": client.key_id},
                    alg=client.key_algorithm,
                )
            )
            yield asking

    async def _discover(self) -> Endpoints:
        for url in discovery_urls(self.client.issuer):
            try:
                body = await fetch_document(self._http, url)
            except NotServed:
                continue
            return self._endpoints_in(body)
        raise NotServed("the issuer serves no metadata document")

    def _endpoints_in(self, body: bytes) -> Endpoints:
        config = self.client.config
        authorization = address_in(body, config, "authorization_endpoint")
        token = address_in(body, config, "token_endpoint")
        try:
            document = json_object(body)
        except ValueError as error:
            raise FetchFailed("the metadata is not one JSON object") from error

        def perhaps(name: str) -> str | None:
            return address_in(body, config, name) if document.get(name) is not None else None

        return Endpoints(
            authorization=authorization,
            token=token,
            end_session=perhaps("end_session_endpoint"),
            revocation=perhaps("revocation_endpoint"),
            names_itself=document.get("authorization_response_iss_parameter_supported") is True,
        )

    def _unavailable(self) -> IssuerUnavailable:
        wait_s = max(self._retry_at - self._monotonic(), 1.0)
        return IssuerUnavailable(self.client.issuer, retry_after_s=math.ceil(wait_s))


class _Within(httpx2.AsyncBaseTransport):
    """Sends by the gateway's own client, which stays open, and reads no more than a document may
    have; no redirect is followed, as it would take the client's secret along."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        answer = await self._http.send(request, stream=True, auth=None, follow_redirects=False)
        try:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise FetchFailed("compressed answer refused")
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > MAX_DOCUMENT_BYTES:
                    raise FetchFailed(f"answer larger than {MAX_DOCUMENT_BYTES} bytes")
        finally:
            await answer.aclose()
        kind = answer.headers.get("content-type", "application/json")
        return httpx2.Response(
            answer.status_code, headers={"content-type": kind}, content=bytes(body)
        )


def error_code(error: object) -> str:
    """An error code as RFC 6749 writes them; `other` for what is none, which is not repeated."""
    text = error if isinstance(error, str) else ""
    known = 0 < len(text) <= 64 and text.replace("_", "").isalnum() and text.isascii()
    return text if known else "other"


def _granted(answer: Mapping[str, Any]) -> GrantedTokens:
    """Raises LoginFailed."""
    access = answer.get("access_token")
    if not isinstance(access, str) or not access or not access.isascii():
        raise LoginFailed("the token endpoint gave no access token")
    if str(answer.get("token_type", "")).lower() != "bearer":
        raise LoginFailed("the token endpoint gave a token that is not a bearer token")
    others = []
    for name in ("refresh_token", "id_token"):
        value = answer.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise LoginFailed(f"the token endpoint gave an unusable {name}")
        others.append(value)
    return GrantedTokens(access_token=access, refresh_token=others[0], id_token=others[1])


def _escaped_basic(
    client: Any, method: str, uri: str, headers: Any, body: Any
) -> tuple[str, Any, Any]:
    """As RFC 6749 section 2.3.1 wants id and secret, which Authlib sends as they are."""

    class Escaped:
        client_id = quote_plus(client.client_id)
        client_secret = quote_plus(client.client_secret)

    escaped: tuple[str, Any, Any] = encode_client_secret_basic(Escaped, method, uri, headers, body)
    return escaped


def private_key(pem: str, algorithm: str) -> RSAKey | ECKey:
    """Raises what the library raises for a text that is no such key."""
    return ECKey.import_key(pem) if algorithm.startswith("ES") else RSAKey.import_key(pem)
