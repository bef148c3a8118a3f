"""Logging in with a browser at a certified provider: the whole way, and what the session can do."""

from __future__ import annotations

import asyncio
import io
import sqlite3
from pathlib import Path
from urllib.parse import parse_qs, quote_plus, urlsplit

import pytest
from joserfc.jwk import ECKey

from tests.http.browsing import PUBLIC, followed, leave_provider
from tests.http.logging_in import BRIEF, READER, RENEWED, SCOPES, site
from tests.idp.oidc_provider.running import ADMIN, SECRET, RealProvider

pytestmark = pytest.mark.anyio


async def test_a_person_logs_in_and_the_cookie_is_a_credential(
    tmp_path: Path, provider: RealProvider, logged: io.StringIO
) -> None:
    async with site(tmp_path, provider) as at:
        browser = at.browser()
        assert (await browser.session())["signed_in"] is False
        assert (await browser.call("GET", "/v1/me")).json()["reason"] == "TOKEN_MISSING"

        url = await browser.begin(provider.issuer, return_to="/v1/operations?page_size=5")
        asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        assert (asked["client_id"], asked["resource"]) == (READER, ADMIN)
        assert asked["redirect_uri"] == f"{PUBLIC}/auth/callback"
        assert asked["scope"].split() == ["openid", *SCOPES]
        assert len(asked["state"]) == len(asked["nonce"]) == len(asked["code_challenge"]) == 43
        assert len(browser.login_cookies) == 1

        back = await browser.log_in(
            "nadia", provider.issuer, return_to="/v1/operations?page_size=5"
        )
        assert (back.status_code, back.headers["location"]) == (303, "/v1/operations?page_size=5")
        assert back.headers["cache-control"] == "no-store"
        assert len(browser.login_cookies) == 1, "of the login that was not finished"

        session = await browser.session()
        assert session["signed_in"] is True
        assert (session["subject"], session["client_id"]) == ("nadia", READER)
        assert session["scopes"] == sorted(SCOPES)
        me = await browser.call("GET", "/v1/me")
        assert (me.status_code, me.json()["subject"], me.json()["kind"]) == (200, "nadia", "person")
        assert (await browser.call("GET", "/v1/engines")).status_code == 200
        pause = await browser.call(
            "POST",
            "/v1/engines/none/pause",
            json={"mode": "drain"},
            headers={"Idempotency-Key": "k"},
        )
        assert (pause.status_code, pause.json()["reason"]) == (404, "ENGINE_NOT_FOUND")
        denied = await browser.call("POST", "/v1/engines/none/abort-requests", json={})
        assert (denied.status_code, denied.json()["reason"]) == (403, "INSUFFICIENT_SCOPE")

        (row,) = await at.audited("login")
        assert (row["outcome"], row["principal"]["subject"]) == ("accepted", "nadia")
        kept = browser.cookies[browser.session_cookie]
        assert_nowhere(tmp_path / "data" / "chadburn.db", kept)
        for answer in browser.seen:
            assert "eyJ" not in answer.text, "no token reaches the browser"
            assert "eyJ" not in str(answer.headers.raw)
        for secret in (kept, "eyJ", asked["state"], asked["nonce"]):
            assert secret not in logged.getvalue()


def assert_nowhere(database: Path, session_id: str) -> None:
    """Neither the session's id nor a token is to be read in the ledger."""
    with sqlite3.connect(database) as connection:
        ((sealed,),) = connection.execute("SELECT sealed FROM browser_sessions").fetchall()
        dump = "\n".join(connection.iterdump())
    assert b"eyJ" not in sealed
    assert session_id not in dump
    assert "eyJ" not in dump


async def test_on_loopback_without_tls(tmp_path: Path, provider: RealProvider) -> None:
    """Plain cookies, a public client, and the only issuer without being named."""
    public = {"client_secret_file": None}
    registered = {"token_endpoint_auth_method": "none", "client_secret": None}
    async with site(tmp_path, provider, base=None, login=public, registration=registered) as at:
        browser = at.browser()
        back = await browser.log_in("nadia")
        assert (back.status_code, back.headers["location"]) == (303, "/ui/")
        assert set(browser.cookies) == {"chadburn-session"}
        assert (await browser.session())["subject"] == "nadia"
        assert (await browser.call("GET", "/v1/me")).status_code == 200


async def test_the_gateway_may_show_itself_by_a_key(tmp_path: Path, provider: RealProvider) -> None:
    key, algorithm = ECKey.generate_key("P-256"), "ES256"
    pem = tmp_path / "client.pem"
    await asyncio.to_thread(pem.write_bytes, key.as_pem(private=True))
    login = {
        "client_auth": "private_key_jwt",
        "client_secret_file": pem,
        "key_algorithm": algorithm,
        "key_id": "k1",
    }
    registered = {
        "token_endpoint_auth_method": "private_key_jwt",
        "client_secret": None,
        "jwks": {"keys": [{**key.as_dict(private=False), "kid": "k1", "alg": algorithm}]},
    }
    async with site(tmp_path, provider, login=login, registration=registered) as at:
        browser = at.browser()
        assert (await browser.log_in("nadia")).status_code == 303
        assert (await browser.session())["signed_in"] is True


async def test_logging_out_here_and_at_the_issuer(tmp_path: Path, provider: RealProvider) -> None:
    async with site(tmp_path, provider, client_id=RENEWED) as at:
        browser, other = at.browser(), at.browser()
        for one in (browser, other):
            await one.log_in("nadia", provider.issuer)
        kept = dict(browser.cookies)
        out = await browser.call("POST", "/auth/logout")
        assert out.status_code == 200, out.text
        assert browser.session_cookie not in browser.cookies
        browser.cookies = kept
        assert (await browser.call("GET", "/v1/me")).json()["reason"] == "SESSION_ENDED"
        assert (await other.call("GET", "/v1/me")).status_code == 200

        url = out.json()["end_session_url"]
        asked = parse_qs(urlsplit(url).query)
        assert asked["client_id"] == [RENEWED]
        assert await leave_provider(browser, url) == f"{PUBLIC}/"
        front = await browser.come_back(f"{PUBLIC}/")
        assert (front.status_code, front.headers["location"]) == (303, "/ui/")
        again = await browser.issuers.get(await browser.begin(provider.issuer))
        asked_again = (await followed(browser, again)).text
        assert 'name="login"' in asked_again
        (row,) = await at.audited("logout")
        assert (row["principal"]["subject"], row["reason"]) == ("nadia", None)
        nothing = await at.browser().call("POST", "/auth/logout")
        assert nothing.json() == {"end_session_url": None}


async def test_a_session_that_is_replaced_ends_at_its_issuer(
    tmp_path: Path, provider: RealProvider
) -> None:
    """And takes nothing of the new one along."""
    async with site(tmp_path, provider, client_id=BRIEF) as at:
        browser = at.browser()

        async def refused(refresh: str | None) -> str:
            form = {"grant_type": "refresh_token", "refresh_token": refresh}
            auth = (BRIEF, quote_plus(SECRET))
            answer = await browser.issuers.post(f"{provider.issuer}/token", data=form, auth=auth)
            return str(answer.json().get("error"))

        await browser.log_in("nadia", provider.issuer)
        first = (await at.tokens_of(browser)).refresh
        # Still logged in at the issuer, which takes both for one.
        await browser.log_in("nadia", provider.issuer)
        second = (await at.tokens_of(browser)).refresh
        assert first != second
        for _ in range(2):  # each of these refreshes
            assert (await browser.call("GET", "/v1/me")).status_code == 200
        third = (await at.tokens_of(browser)).refresh
        for name in ("nadia", "otto"):
            browser.issuers.cookies.clear()
            await browser.log_in(name, provider.issuer)
            assert await refused(third) == "invalid_grant", name
            assert (await browser.call("GET", "/v1/me")).json()["subject"] == name
            third = (await at.tokens_of(browser)).refresh
        rows = await at.audited("end_session")
        assert [row["reason"] for row in rows] == ["SESSION_REPLACED"] * 3


async def test_the_issuer_ends_a_session(tmp_path: Path, provider: RealProvider) -> None:
    """By its back channel, of one session and not of the other; a stream of it ends too."""
    async with site(tmp_path, provider) as at:
        object.__setattr__(at.gate.rooms.edge, "stream_look_s", 0.05)
        browser, other = at.browser(), at.browser()
        for one in (browser, other):
            await one.log_in("nadia", provider.issuer)
        headers = {
            "Host": "chadburn.test",
            "Accept": "text/event-stream",
            "Cookie": f"{browser.session_cookie}={browser.cookies[browser.session_cookie]}",
        }
        async with at.gate.http.stream("GET", "/v1/events", headers=headers) as stream:
            assert stream.status_code == 200
            lines = stream.aiter_lines()
            async with asyncio.timeout(60):
                while await anext(lines) != "event: snapshot":
                    pass
                end = f"{provider.issuer}/session/end?client_id={READER}"
                await leave_provider(browser, end)
                rest = [line async for line in lines]
        assert "event: goodbye" in rest
        assert any("permission_lost" in line for line in rest)
        assert (await browser.call("GET", "/v1/me")).json()["reason"] == "SESSION_ENDED"
        assert (await other.call("GET", "/v1/me")).status_code == 200
        (row,) = await at.audited("logout")
        assert (row["principal"]["subject"], row["reason"]) == ("nadia", "LOGGED_OUT_BY_ISSUER")


async def test_tokens_are_renewed_by_one_of_many_requests(
    tmp_path: Path, provider: RealProvider
) -> None:
    """The provider ends the whole grant when it sees a refresh token twice."""
    async with site(tmp_path, provider, client_id=BRIEF) as at:
        browser = at.browser()
        await browser.log_in("nadia", provider.issuer)
        for _ in range(3):
            answers = await asyncio.gather(*(browser.call("GET", "/v1/me") for _ in range(12)))
            assert [answer.status_code for answer in answers] == [200] * 12
        assert await at.audited("end_session") == []


async def test_a_refresh_token_that_was_used_elsewhere_ends_the_session(
    tmp_path: Path, provider: RealProvider
) -> None:
    async with site(tmp_path, provider, client_id=BRIEF) as at:
        browser = at.browser()
        await browser.log_in("nadia", provider.issuer)
        stolen = (await at.tokens_of(browser)).refresh
        form = {"grant_type": "refresh_token", "refresh_token": stolen}
        used = await browser.issuers.post(
            f"{provider.issuer}/token", data=form, auth=(BRIEF, quote_plus(SECRET))
        )
        assert used.status_code == 200, used.text
        answer = await browser.call("GET", "/v1/me")
        assert (answer.status_code, answer.json()["reason"]) == (401, "SESSION_ENDED")
        (row,) = await at.audited("end_session")
        assert (row["principal"]["subject"], row["reason"]) == ("nadia", "REFRESH_REFUSED")
