"""Issuers that answer a login badly: no session, and a reason for whoever runs the gateway."""

from __future__ import annotations

import base64
import gzip
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.auth.sessions.errors import LoginFailed, LoginMixedUp
from app.auth.sessions.kept import Visitor
from app.auth.tokens.errors import IssuerUnavailable
from app.devidp.issuer import DevIssuer
from tests.auth.answering import CLIENT, Desk, answering
from tests.auth.conftest import ADMIN, Clock, Origin, Verifiers

pytestmark = pytest.mark.anyio

LONG = "x" * (300 * 1024)


@pytest.fixture
async def desk(
    origin: Origin,
    issuer: DevIssuer,
    verifiers: Verifiers,
    http: httpx2.AsyncClient,
    clock: Clock,
    tmp_path: Path,
    ledger_url: str,
) -> AsyncIterator[Desk]:
    async with answering(origin, issuer, verifiers, http, clock, tmp_path, ledger_url) as made:
        yield made


async def test_a_good_answer_and_what_was_asked_for(desk: Desk) -> None:
    finished = await desk.log_in()
    assert finished.location == "/auth/"
    headers, form = desk.origin.posted[-1]
    assert form["grant_type"] == "authorization_code"
    assert form["redirect_uri"] == "https://gw.test/auth/callback"
    assert len(form["code_verifier"]) == 43
    assert headers["accept-encoding"] == "identity"
    # RFC 6749 section 2.3.1: both are escaped as in a form, and only then put together.
    user, _, password = basic(headers["authorization"]).partition(":")
    assert (user, password) == ("dash%3Aboard", "a+secret%3A+of+%25+and+%C3%BC")
    assert "client_secret" not in form


def basic(header: str) -> str:
    return base64.b64decode(header.removeprefix("Basic ")).decode()


NO_ANSWERS: list[tuple[bytes, dict[str, Any], type[Exception]]] = [
    (b"", {"status": 302, "headers": {"location": "/elsewhere"}}, IssuerUnavailable),
    (b"{}", {"status": 307, "headers": {"location": "/elsewhere"}}, LoginFailed),
    (b"broken", {"status": 500}, IssuerUnavailable),
    (b'{"error":"server_error"}', {"status": 503}, IssuerUnavailable),
    (b"too many", {"status": 429}, IssuerUnavailable),
    (b"not json", {}, LoginFailed),
    (b"[]", {}, LoginFailed),
    (b"{}", {}, LoginFailed),
    (json.dumps({"access_token": LONG}).encode(), {}, IssuerUnavailable),
    (gzip.compress(b"{}"), {"headers": {"content-encoding": "gzip"}}, IssuerUnavailable),
    (b'{"error":"invalid_grant"}', {"status": 400}, LoginFailed),
    (b'{"error":"invalid_client"}', {"status": 401}, LoginFailed),
    (b'{"error":"<script>"}', {"status": 400}, LoginFailed),
    (b'{"error":7}', {"status": 400}, LoginFailed),
]


async def test_answers_that_are_none(desk: Desk) -> None:
    for body, how, error in NO_ANSWERS:
        with pytest.raises(error) as refused:
            await desk.log_in(body, how=how)
        assert "script" not in getattr(refused.value, "why", "")
    assert desk.origin.requests["/elsewhere"] == 0


NO_TOKENS: list[dict[str, Any]] = [
    {"access_token": ...},
    {"access_token": ""},
    {"access_token": 7},
    {"access_token": "é.é.é"},
    {"access_token": "opaque"},
    {"token_type": "DPoP"},
    {"token_type": ...},
    {"refresh_token": 7},
    {"refresh_token": ""},
    {"id_token": ...},
    {"id_token": ""},
    {"id_token": "a.b.c"},
    {"id_claim_nonce": "another"},
    {"id_claim_aud": "another"},
    {"id_claim_iss": "https://evil.test"},
    {"id_claim_at_hash": "another"},
    {"id_claim_exp": 1},
]


async def test_tokens_that_are_no_good(desk: Desk) -> None:
    for changes in NO_TOKENS:
        with pytest.raises(LoginFailed):
            await desk.log_in(**changes)


async def test_access_tokens_are_judged_as_a_bearer_s(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    mint = desk.issuer.mint
    stranger = DevIssuer(desk.origin.url, now=desk.issuer._now)
    for access in (
        mint("ada", CLIENT, ["admin:read"], "urn:another", 300),
        mint("ada", CLIENT, ["admin:read"], ADMIN, -60),
        mint("ada", CLIENT, ["admin:read"], ADMIN, 300, header={"typ": "JWT"}, nonce="n"),
        mint("ada", CLIENT, ["admin:read"], ADMIN, 300, cnf={"jkt": "x"}),
        stranger.mint("ada", CLIENT, ["admin:read"], ADMIN, 300),
    ):
        with caplog.at_level(logging.WARNING), pytest.raises(LoginFailed):
            await desk.log_in(access_token=access)
        assert "TOKEN_" in caplog.text
        assert access not in caplog.text
        caplog.clear()
    identity = stranger.sign(
        {"iss": desk.origin.url, "aud": CLIENT, "sub": "ada"},
        {"alg": stranger.algorithm, "kid": stranger.key.kid},
    )
    with pytest.raises(LoginFailed):
        await desk.log_in(id_token=identity)


ASTRAY: list[dict[str, Any]] = [
    {"issuer": "https://neighbour.test"},
    {"authorization_endpoint": ...},
    {"token_endpoint": ...},
    {"token_endpoint": "http://elsewhere.test/token"},
    {"authorization_endpoint": "javascript:alert(1)"},
    {"end_session_endpoint": "http://elsewhere.test/end"},
    {"revocation_endpoint": 7},
]


async def test_metadata_that_leads_astray(desk: Desk, clock: Clock) -> None:
    for changes in ASTRAY:
        desk.announce(**changes)
        with pytest.raises(IssuerUnavailable):
            await desk.log_in()
        clock.advance(10)
    desk.announce()
    await desk.log_in()
    desk.announce(issuer="https://neighbour.test")
    clock.advance(3600)
    await desk.log_in()  # by what was known before


async def test_an_only_issuer_need_not_name_itself_unless_it_says_so(desk: Desk) -> None:
    await desk.log_in(iss=None)
    with pytest.raises(LoginMixedUp):
        await desk.log_in(iss="https://evil.test")


async def test_an_only_issuer_that_says_so_has_to(desk: Desk) -> None:
    desk.announce(authorization_response_iss_parameter_supported=True)
    await desk.log_in()
    with pytest.raises(LoginMixedUp):
        await desk.log_in(iss=None)


async def test_a_secret_that_cannot_be_read_is_no_fault_of_the_person(
    desk: Desk, tmp_path: Path
) -> None:
    (tmp_path / "secret").unlink()
    with pytest.raises(IssuerUnavailable):
        await desk.log_in()


async def test_an_issuer_that_ends_no_sessions(desk: Desk) -> None:
    finished = await desk.log_in()
    session = await desk.house.desk.found([finished.cookies[0].partition(";")[0]])
    assert session is not None
    assert await desk.house.desk.log_out(session, Visitor()) is None
