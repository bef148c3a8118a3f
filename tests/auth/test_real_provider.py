"""Tokens of a certified OpenID provider written by others, judged through discovery.

What is proved here and by no fixture of ours: that the strict profile takes what RFC 9068 means in
practice, and refuses the same provider's ID tokens, bound tokens and opaque tokens.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx2
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey

from app.auth.principal import AudienceKind, PrincipalKind
from app.auth.tokens.errors import TokenInvalid
from app.auth.tokens.issuers import IssuerConfig, TokenProfile
from app.auth.tokens.verifier import TokenVerifier
from app.domain.scopes import Scope
from tests.idp.oidc_provider.running import ADMIN, INFERENCE, OPAQUE, SECRET, real_provider

pytestmark = pytest.mark.anyio

CALLBACK = "http://127.0.0.1/callback"


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with real_provider() as issuer:
        yield issuer


@pytest.fixture
async def http(provider: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=provider, verify=False, trust_env=False) as client:
        yield client


def verifier(http: httpx2.AsyncClient, issuer: str, **changes: Any) -> TokenVerifier:
    config = IssuerConfig(
        **{
            "issuer": issuer,
            "audience": ADMIN,
            "inference_audiences": (INFERENCE,),
            **changes,
        }
    )
    return TokenVerifier([config], http=http, now=lambda: datetime.now(UTC))


async def ask(
    http: httpx2.AsyncClient, resource: str, scope: str, **headers: str
) -> dict[str, Any]:
    form = {"grant_type": "client_credentials", "resource": resource, "scope": scope}
    answer = await http.post("/token", data=form, auth=("pipeline", SECRET), headers=headers)
    body: dict[str, Any] = answer.json()
    assert answer.status_code == 200, body
    return body


async def refusal(judge: TokenVerifier, token: str) -> str:
    with pytest.raises(TokenInvalid) as caught:
        await judge.verify(token)
    return caught.value.reason


async def test_takes_an_access_token_for_administration(
    http: httpx2.AsyncClient, provider: str
) -> None:
    body = await ask(http, ADMIN, "admin:read admin:pause")
    judge = verifier(http, provider)
    who = await judge.verify(body["access_token"])
    assert (who.issuer, who.subject, who.client_id) == (provider, "pipeline", "pipeline")
    assert who.scopes == {Scope.READ, Scope.PAUSE}
    assert who.kind is PrincipalKind.CLIENT
    assert who.audience is AudienceKind.ADMIN
    assert who.token_id
    assert abs(who.expires_at.timestamp() - time.time() - body["expires_in"]) < 60
    (state,) = judge.issuer_states()
    assert (state.ok, state.keys) == (True, 2)
    assert await verifier(http, provider, profile=TokenProfile.COMPATIBLE).verify(
        body["access_token"]
    )


async def test_every_admin_scope_passes_under_its_own_name(
    http: httpx2.AsyncClient, provider: str
) -> None:
    token = (await ask(http, ADMIN, " ".join(Scope)))["access_token"]
    assert (await verifier(http, provider).verify(token)).scopes == set(Scope)


async def test_a_token_for_inference_may_not_administer(
    http: httpx2.AsyncClient, provider: str
) -> None:
    token = (await ask(http, INFERENCE, "inference:generate"))["access_token"]
    who = await verifier(http, provider).verify(token)
    assert who.audience is AudienceKind.INFERENCE
    assert not who.may_administer
    assert await refusal(verifier(http, provider, inference_audiences=()), token) == (
        "TOKEN_AUDIENCE_FOREIGN"
    )


async def test_an_algorithm_that_was_not_named_is_refused(
    http: httpx2.AsyncClient, provider: str
) -> None:
    token = (await ask(http, ADMIN, "admin:read"))["access_token"]
    judge = verifier(http, provider, algorithms=("ES256",))
    assert await refusal(judge, token) == "TOKEN_ALGORITHM_REFUSED"


async def test_an_opaque_token_is_no_jwt(http: httpx2.AsyncClient, provider: str) -> None:
    token = (await ask(http, OPAQUE, "admin:read"))["access_token"]
    assert await refusal(verifier(http, provider), token) == "TOKEN_MALFORMED"


async def test_a_token_bound_to_a_key_is_no_bearer_token(
    http: httpx2.AsyncClient, provider: str
) -> None:
    key = ECKey.generate_key("P-256")
    header = {"alg": "ES256", "typ": "dpop+jwt", "jwk": key.as_dict(private=False)}
    claims = {
        "jti": secrets.token_urlsafe(),
        "htm": "POST",
        "htu": f"{provider}/token",
        "iat": int(time.time()),
    }
    proof = jwt.encode(header, claims, key, algorithms=["ES256"], default_type=None)
    body = await ask(http, ADMIN, "admin:read", DPoP=proof)
    assert body["token_type"] == "DPoP"
    assert await refusal(verifier(http, provider), body["access_token"]) == "TOKEN_BOUND"


async def test_a_person_logs_in_and_only_the_access_token_counts(
    http: httpx2.AsyncClient, provider: str
) -> None:
    body = await log_in(http, provider, "nadia", "openid admin:read admin:abort")
    who = await verifier(http, provider).verify(body["access_token"])
    assert (who.subject, who.client_id, who.kind) == ("nadia", "console", PrincipalKind.PERSON)
    assert who.scopes == {Scope.READ, Scope.ABORT}
    # The ID token of the same login, signed with the same key, even where a careless setting
    # makes the login client's id the audience.
    for profile in TokenProfile:
        for audience in (ADMIN, "console"):
            judge = verifier(http, provider, audience=audience, profile=profile)
            assert await refusal(judge, body["id_token"]) == "TOKEN_TYPE_REFUSED"


async def log_in(http: httpx2.AsyncClient, provider: str, name: str, scope: str) -> dict[str, Any]:
    """Authorization code with PKCE, filling in the provider's own pages."""
    verifier = secrets.token_urlsafe(48)
    digest = hashlib.sha256(verifier.encode()).digest()
    page = await http.get(
        "/auth",
        params={
            "client_id": "console",
            "response_type": "code",
            "redirect_uri": CALLBACK,
            "scope": scope,
            "resource": ADMIN,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
            "state": "s",
        },
    )
    for form in ({"prompt": "login", "login": name, "password": "any"}, {"prompt": "consent"}):
        page = await follow(http, page)
        action = re.search(r'action="([^"]+)"', page.text)
        assert action is not None, page.text
        page = await http.post(urljoin(str(page.url), action.group(1)), data=form)
    page = await follow(http, page)
    answer = parse_qs(urlsplit(page.headers["location"]).query)
    assert answer["iss"] == [provider]
    exchanged = await http.post(
        "/token",
        data={
            "grant_type": "authorization_code",
            "client_id": "console",
            "code": answer["code"][0],
            "redirect_uri": CALLBACK,
            "code_verifier": verifier,
        },
    )
    body: dict[str, Any] = exchanged.json()
    assert exchanged.status_code == 200, body
    return body


async def follow(http: httpx2.AsyncClient, page: httpx2.Response) -> httpx2.Response:
    """Through the provider's redirects, up to a page or the way back to the client."""
    while page.is_redirect and not page.headers["location"].startswith(CALLBACK):
        page = await http.get(urljoin(str(page.url), page.headers["location"]))
    return page
