"""Tokens of a certified OpenID provider written by others, judged through discovery.

What is proved here and by no fixture of ours: that the strict profile takes what RFC 9068 means in
practice, and refuses the same provider's ID tokens; that its opaque tokens are judged by its
answers, bound ones with their proofs, and that it can change its key.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx2
import pytest

from app.auth.principal import AudienceKind, PrincipalKind
from app.auth.tokens.compact import parse
from app.auth.tokens.dpop import Shown
from app.auth.tokens.errors import IssuerUnavailable, ProofInvalid, TokenInvalid
from app.auth.tokens.issuers import DpopUse, IntrospectionConfig, IssuerConfig, TokenProfile
from app.auth.tokens.verifier import TokenVerifier
from app.domain.scopes import Scope
from tests.auth.conftest import KeptProofs
from tests.auth.proving import Holder
from tests.idp.oidc_provider.running import (
    ADMIN,
    INFERENCE,
    OPAQUE,
    SECRET,
    RealProvider,
    real_provider,
)

pytestmark = pytest.mark.anyio

CALLBACK = "http://127.0.0.1/callback"


@pytest.fixture(scope="module")
def running() -> Iterator[RealProvider]:
    with real_provider() as running:
        yield running


@pytest.fixture
def provider(running: RealProvider) -> str:
    return running.issuer


@pytest.fixture
async def http(provider: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=provider, verify=False, trust_env=False) as client:
        yield client


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return file


def verifier(http: httpx2.AsyncClient, issuer: str, **changes: Any) -> TokenVerifier:
    config = IssuerConfig(
        **{
            "issuer": issuer,
            "audience": ADMIN,
            "inference_audiences": (INFERENCE,),
            **changes,
        }
    )
    return TokenVerifier([config], http=http, now=lambda: datetime.now(UTC), proofs=KeptProofs())


def asking(http: httpx2.AsyncClient, issuer: str, secret: Path, **changes: Any) -> TokenVerifier:
    """A verifier that asks the provider about opaque tokens, each time anew."""
    asks = {"client_id": "gateway", "client_secret_file": secret, "cache_s": 0}
    introspection = IntrospectionConfig(**{**asks, **changes.pop("asks", {})})
    return verifier(http, issuer, audience=OPAQUE, introspection=introspection, **changes)


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


async def test_a_token_bound_to_a_key_is_taken_with_a_proof_of_it_alone(
    http: httpx2.AsyncClient, provider: str, secret: Path
) -> None:
    holder, at = Holder(), "https://gateway.test/v1/engines"
    for resource, judge in (
        (ADMIN, verifier(http, provider, dpop=DpopUse.ALLOWED)),
        (OPAQUE, asking(http, provider, secret, **OWN_SUBJECT, dpop=DpopUse.ALLOWED)),
    ):
        now = time.time()
        proof = holder.proof("", f"{provider}/token", method="POST", at=now, ath=...)
        body = await ask(http, resource, "admin:read", DPoP=proof)
        assert body["token_type"] == "DPoP"
        token = token_of(body)
        assert await refusal(judge, token) == "TOKEN_BOUND"
        shown = Shown(holder.proof(token, at, at=now), "GET", at)
        assert (await judge.verify_bound(token, shown)).subject == "pipeline"
        stranger = Shown(Holder().proof(token, at, at=now), "GET", at)
        with pytest.raises(ProofInvalid):
            await judge.verify_bound(token, stranger)
    assert await refusal(verifier(http, provider), token_of(body)) == "TOKEN_MALFORMED"


def token_of(body: dict[str, Any]) -> str:
    return str(body["access_token"])


OWN_SUBJECT = {"subject_claims": ("sub", "client_id")}


async def test_a_program_s_opaque_token_is_what_the_provider_says(
    http: httpx2.AsyncClient, provider: str, secret: Path
) -> None:
    token = token_of(await ask(http, OPAQUE, "admin:read admin:pause"))
    # It names no subject for client credentials, and nobody guesses one.
    assert await refusal(asking(http, provider, secret), token) == "TOKEN_CLAIM_MISSING"
    judge = asking(http, provider, secret, **OWN_SUBJECT)
    who = await judge.verify(token)
    assert (who.issuer, who.subject, who.client_id) == (provider, "pipeline", "pipeline")
    assert who.scopes == {Scope.READ, Scope.PAUSE}
    assert who.kind is PrincipalKind.CLIENT
    assert await refusal(judge, token[:-1] + ("A" if token[-1] != "A" else "B")) == (
        "TOKEN_INACTIVE"
    )
    elsewhere = asking(http, provider, secret, **OWN_SUBJECT)
    await elsewhere.warm()
    assert elsewhere.issuer_states()[0].ok
    revoked = await http.post("/token/revocation", data={"token": token}, auth=("pipeline", SECRET))
    assert revoked.status_code == 200, revoked.text
    assert await refusal(judge, token) == "TOKEN_INACTIVE"


async def test_a_secret_that_the_provider_refuses_is_nobody_s_fault_but_ours(
    http: httpx2.AsyncClient, provider: str, secret: Path
) -> None:
    await asyncio.to_thread(secret.write_text, "another")
    judge = asking(http, provider, secret)
    await judge.warm()
    (state,) = judge.issuer_states()
    assert (state.ok, state.problem) == (False, "introspection: HTTP 401")
    with pytest.raises(IssuerUnavailable):
        await judge.verify(token_of(await ask(http, OPAQUE, "admin:read")))


async def test_a_person_s_opaque_token_counts_and_its_refresh_token_does_not(
    http: httpx2.AsyncClient, provider: str, secret: Path
) -> None:
    scope = "openid offline_access admin:read"
    body = await log_in(http, provider, "nadia", scope, resource=OPAQUE)
    judge = asking(http, provider, secret)
    who = await judge.verify(body["access_token"])
    assert (who.subject, who.client_id, who.kind) == ("nadia", "console", PrincipalKind.PERSON)
    assert who.scopes == {Scope.READ}
    for profile in (TokenProfile.STRICT, TokenProfile.COMPATIBLE):
        judge = asking(http, provider, secret, profile=profile)
        assert await refusal(judge, body["refresh_token"]) == "TOKEN_TYPE_REFUSED"
        assert await refusal(judge, body["id_token"]) == "TOKEN_TYPE_REFUSED"


async def test_a_new_key_costs_one_fetch_and_the_old_one_stays_good(
    running: RealProvider, http: httpx2.AsyncClient
) -> None:
    fetches = []

    async def note(request: httpx2.Request) -> None:
        if request.url.path == "/jwks":
            fetches.append(request.url.path)

    judge = verifier(http, running.issuer)
    before = token_of(await ask(http, ADMIN, "admin:read"))
    await judge.verify(before)
    http.event_hooks["request"].append(note)
    kid = running.rotate()
    for _ in range(3):
        token = token_of(await ask(http, ADMIN, "admin:read"))
        assert parse(token).kid == kid
        assert await judge.verify(token)
    assert await judge.verify(before)
    assert await judge.verify(token_of(await ask(http, INFERENCE, "inference:generate")))
    assert len(fetches) == 1


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


async def log_in(
    http: httpx2.AsyncClient, provider: str, name: str, scope: str, resource: str = ADMIN
) -> dict[str, Any]:
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
            "resource": resource,
            **({"prompt": "consent"} if "offline_access" in scope else {}),
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
