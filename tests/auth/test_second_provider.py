"""Tokens of a second provider by other authors, and an awkward one: it needs the compatible profile
and its answers both.

Its programs get opaque tokens, its people JWTs without scope, client or id; and asked without a
hint it calls refresh tokens active, and `Bearer`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx2
import pytest

from app.auth.principal import PrincipalKind
from app.auth.tokens.errors import TokenInvalid
from app.auth.tokens.issuers import Introspected, IntrospectionConfig, IssuerConfig, TokenProfile
from app.auth.tokens.verifier import TokenVerifier
from app.domain.scopes import Scope
from tests.idp.canaille.running import PASSWORD, SECRET, canaille

pytestmark = pytest.mark.anyio

CALLBACK = "http://127.0.0.1/callback"


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with canaille() as issuer:
        yield issuer


@pytest.fixture
async def http(provider: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(
        base_url=provider, verify=False, trust_env=False, timeout=60
    ) as client:
        yield client


@pytest.fixture
def asks(tmp_path: Path) -> IntrospectionConfig:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return IntrospectionConfig(
        client_id="gateway", client_secret_file=file, tokens=Introspected.ALL, cache_s=0
    )


def verifier(http: httpx2.AsyncClient, issuer: str, **changes: Any) -> TokenVerifier:
    config = IssuerConfig(
        **{
            "issuer": issuer,
            "audience": "gateway",
            "profile": TokenProfile.COMPATIBLE,
            "subject_claims": ("sub", "client_id"),
            **changes,
        }
    )
    return TokenVerifier([config], http=http, now=lambda: datetime.now(UTC))


async def refusal(judge: TokenVerifier, token: str) -> str:
    with pytest.raises(TokenInvalid) as caught:
        await judge.verify(token)
    return caught.value.reason


async def test_a_program_s_opaque_token(
    http: httpx2.AsyncClient, provider: str, asks: IntrospectionConfig
) -> None:
    form = {"grant_type": "client_credentials", "scope": "admin:read admin:pause"}
    answer = await http.post("/oauth/token", data=form, auth=("pipeline", SECRET))
    token = answer.json()["access_token"]
    judge = verifier(http, provider, introspection=asks)
    await judge.warm()
    (state,) = judge.issuer_states()
    assert (state.ok, state.keys) == (True, 1)
    who = await judge.verify(token)
    assert (who.subject, who.client_id) == ("pipeline", "pipeline")
    assert who.kind is PrincipalKind.CLIENT
    assert who.scopes == {Scope.READ, Scope.PAUSE}
    other = verifier(http, provider, introspection=asks, audience="else")
    assert await refusal(other, token) == "TOKEN_AUDIENCE_FOREIGN"
    assert await refusal(judge, token[:-1]) == "TOKEN_INACTIVE"


async def test_a_person_s_token_is_judged_by_its_keys_and_its_answer(
    http: httpx2.AsyncClient, provider: str, asks: IntrospectionConfig
) -> None:
    tokens = await log_in(http, "openid profile offline_access admin:read")
    judge = verifier(http, provider, introspection=asks)
    who = await judge.verify(tokens["access_token"])
    assert (who.issuer, who.subject, who.client_id) == (provider, "nadia", "console")
    assert who.kind is PrincipalKind.PERSON
    assert who.scopes == {Scope.READ}
    # By itself the token shows neither that it is an access token nor what it allows.
    alone = verifier(http, provider)
    assert await refusal(alone, tokens["access_token"]) == "TOKEN_TYPE_REFUSED"
    assert await refusal(alone, tokens["id_token"]) == "TOKEN_TYPE_REFUSED"
    assert await refusal(judge, tokens["id_token"]) == "TOKEN_INACTIVE"
    assert await refusal(judge, tokens["refresh_token"]) == "TOKEN_INACTIVE"


async def log_in(http: httpx2.AsyncClient, scope: str) -> dict[str, Any]:
    """Authorization code with PKCE, filling in the provider's own pages."""
    verifier = secrets.token_urlsafe(48)
    digest = hashlib.sha256(verifier.encode()).digest()
    page = await http.get(
        "/oauth/authorize",
        params={
            "client_id": "console",
            "response_type": "code",
            "redirect_uri": CALLBACK,
            "scope": scope,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
            "state": "s",
        },
    )
    for form in ({"login": "nadia"}, {"password": PASSWORD}):
        page = await follow(http, page)
        guard = re.search(r'name="csrf_token"[^>]*value="([^"]+)"', page.text)
        assert guard is not None, page.text
        page = await http.post(
            str(page.url),
            data={**form, "csrf_token": guard.group(1)},
            headers={"referer": str(page.url)},
        )
    page = await follow(http, page)
    answer = parse_qs(urlsplit(page.headers["location"]).query)
    exchanged = await http.post(
        "/oauth/token",
        data={
            "grant_type": "authorization_code",
            "code": answer["code"][0],
            "redirect_uri": CALLBACK,
            "code_verifier": verifier,
        },
        auth=("console", SECRET),
    )
    body: dict[str, Any] = exchanged.json()
    assert exchanged.status_code == 200, body
    return body


async def follow(http: httpx2.AsyncClient, page: httpx2.Response) -> httpx2.Response:
    """Through the provider's redirects, up to a page or the way back to the client."""
    while page.is_redirect and not page.headers["location"].startswith(CALLBACK):
        page = await http.get(urljoin(str(page.url), page.headers["location"]))
    return page
