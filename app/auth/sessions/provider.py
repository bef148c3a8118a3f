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
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import httpx2
from authlib.integrations.httpx_client import AsyncOAuth2Client, OAuthError
from authlib.oauth2.rfc7523 import PrivateKeyJWT
from joserfc.errors import JoseError

from app.auth.sessions.clients import LoginAuth, LoginClient
from app.auth.sessions.errors import LoginFailed
from app.auth.sessions.wire import Within, error_code, escaped_basic, private_key
from app.auth.tokens.errors import IssuerUnavailable
from app.auth.tokens.fetch import (
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

    access_token: str = field(repr=False)
    refresh_token: str | None = field(repr=False)
    id_token: str | None = field(repr=False)


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
        self._fetching: asyncio.Task[None] | None = None
        self._fetched_at = float("-inf")
        self._retry_at = float("-inf")

    async def endpoints(self) -> Endpoints:
        """Old ones while the issuer is down. All who wait share one question, which is nobody's who
        may hang up."""
        now = self._monotonic()
        old = now - self._fetched_at >= self._timings.metadata_ttl_s
        if (old or self._endpoints is None) and (self._fetching or now >= self._retry_at):
            if self._fetching is None:
                self._fetching = asyncio.create_task(self._fetch(), name="login-metadata")
                self._fetching.add_done_callback(self._fetched)
            await asyncio.wait([self._fetching])
        if self._endpoints is None:
            raise self._unavailable()
        return self._endpoints

    async def aclose(self) -> None:
        """End a question under way."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])

    async def authorization_url(self, *, state: str, nonce: str, code_verifier: str) -> str:
        """Where the browser goes to log in: authorization code with PKCE, S256 and nothing less."""
        endpoints = await self.endpoints()
        async with self._client(None) as asking:
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
        """With what shows the gateway to the issuer. Raises IssuerUnavailable where that can't be
        read: it may be in the middle of being replaced, and no person can do anything about it."""
        secret: Any = None
        if self.client.secret_file is not None:
            try:
                text = await asyncio.to_thread(self.client.secret_file.read_text, "utf-8")
                secret = text.strip()
                if self.client.auth is LoginAuth.PRIVATE_KEY_JWT:
                    secret = private_key(secret, self.client.key_algorithm)
            except (OSError, ValueError, JoseError) as error:
                kind = type(error).__name__
                log.error("the secret for %s can't be used: %s", self.client.issuer, kind)
                raise self._unavailable() from None
        async with self._client(secret) as asking:
            yield asking

    def _client(self, secret: Any) -> AsyncOAuth2Client:
        """For one exchange: Authlib's client keeps what it was given last."""
        method = _AUTH_METHODS[self.client.auth]
        made = AsyncOAuth2Client(
            client_id=self.client.client_id,
            client_secret=secret,
            token_endpoint_auth_method=method,
            revocation_endpoint_auth_method=method,
            code_challenge_method="S256",
            redirect_uri=self._redirect_uri,
            transport=Within(self._http),
            trust_env=False,
        )
        made.register_client_auth_method(("client_secret_basic", escaped_basic))
        made.register_client_auth_method(
            PrivateKeyJWT(
                # Authlib's own would be good for an hour.
                claims={"exp": int(self._now().timestamp()) + _ASSERTION_S},
                headers={} if self.client.key_id is None else {"kid": self.client.key_id},
                alg=self.client.key_algorithm,
            )
        )
        return made

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(self._timings.metadata_deadline_s):
                self._endpoints = await self._discover()
        except (FetchFailed, TimeoutError) as error:
            self._retry_at = self._monotonic() + self._timings.backoff_s
            log.warning("no metadata of %s: %s", self.client.issuer, str(error) or "no answer")
        else:
            self._fetched_at = self._monotonic()

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetching = None
        if not task.cancelled():
            task.result()  # what still comes out of there is a defect, for the loop to show

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
