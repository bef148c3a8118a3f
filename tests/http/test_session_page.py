"""What people see of logins: the page of their session, and why a login came to nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlencode

import httpx2
import pytest

from tests.http.browsing import at_provider
from tests.http.gateway import gateway
from tests.http.logging_in import SCOPES, Site, site, two_issuers
from tests.idp.oidc_provider.running import RealProvider

pytestmark = pytest.mark.anyio

HTML = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
MARK = "canary0echo0yranac"


@pytest.fixture
async def at(tmp_path: Path, provider: RealProvider) -> AsyncIterator[Site]:
    async with two_issuers(tmp_path, provider) as made:
        yield made


def is_page(answer: httpx2.Response) -> str:
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not any("unsafe" in rule or "*" in rule for rule in policy), policy
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.startswith("<!doctype html>")
    assert "style" not in answer.text
    assert "onclick" not in answer.text
    return answer.text


async def test_the_page_of_a_session(at: Site) -> None:
    browser = at.browser()
    nobody = is_page(await browser.go("/auth/", Accept=HTML))
    assert "Nobody is logged in" in nobody
    assert f"/auth/login?{urlencode({'issuer': at.provider.issuer})}" in nobody
    assert "<script" not in nobody
    back = await browser.log_in("nadia", at.provider.issuer)
    assert back.headers["location"] == "/ui/"
    answer = await browser.go("/auth/")
    page = is_page(answer)
    assert f"nadia, by {at.provider.issuer}" in page
    assert all(f"<code>{scope}</code>" in page for scope in SCOPES)
    assert '<button id="log-out" data-url="/auth/logout">' in page
    assert '<script src="/auth/page.js" defer></script>' in page
    assert page.count("<script") == 1
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'; connect-src 'self'" in policy
    script = await browser.send("GET", "/auth/page.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert '"X-Requested-With": "chadburn"' in script.text
    frame = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}
    refused = await browser.go("/auth/", **frame)
    assert (refused.status_code, refused.json()["reason"]) == (403, "CROSS_SITE_REFUSED")
    assert (await browser.call("POST", "/auth/logout")).status_code == 200
    assert "Nobody is logged in" in (await browser.go("/auth/")).text


async def test_there_is_none_where_nobody_logs_in(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", registered=False) as gate:
        missing = await gate.http.get("/auth/", headers={"Accept": HTML})
        assert missing.status_code == 404
        assert "/auth/login" not in is_page(missing)
        assert (await gate.http.get("/auth/")).json()["reason"] == "ROUTE_NOT_FOUND"


async def test_why_a_login_came_to_nothing(at: Site) -> None:
    browser = at.browser()

    async def told(url: str, status: int, reason: str) -> str:
        cookies = dict(browser.cookies)
        plain = await browser.go(url)
        assert (plain.status_code, plain.json()["reason"]) == (status, reason), plain.text
        assert plain.headers["content-type"] == "application/problem+json"
        browser.cookies = cookies
        answer = await browser.go(url, Accept=HTML)
        page = is_page(answer)
        assert answer.status_code == status
        assert f"<code>{reason}</code>" in page
        assert f"<code>{answer.headers['x-request-id']}</code>" in page
        assert '<a href="/auth/login">' in page
        assert MARK not in page
        return page

    code = f"code={MARK}&iss={MARK}"
    page = await told(f"/auth/callback?{code}&state={MARK}", 400, "LOGIN_UNKNOWN")
    assert "No such login is under way in this browser." in page
    await told(f"/auth/callback/{MARK}?{code}", 400, "LOGIN_UNKNOWN")
    await told(f"/auth/login?issuer={MARK}", 400, "LOGIN_ISSUER_UNKNOWN")
    await told(f"/auth/login?return_to=//{MARK}", 400, "RETURN_TO_REFUSED")
    await told(f"/auth/login?{MARK}=x", 422, "SCHEMA_VIOLATION")

    good = httpx2.URL(await at_provider(browser, await browser.begin(at.provider.issuer), "n"))
    state = good.params["state"]
    denied = urlencode({"state": state, "error": "access_denied", "error_description": MARK})
    iss = urlencode({"iss": at.provider.issuer})
    answer = await browser.go(f"/auth/callback?{denied}&{iss}", Accept=HTML)
    assert "The issuer did not log you in." in is_page(answer)
    assert MARK not in answer.text
    await told(f"/auth/callback?{denied}&{iss}", 400, "LOGIN_REPLAYED")
    # What programs ask is answered as ever.
    for accept in (
        "application/json",
        "*/*",
        "application/problem+json, text/html;q=0.5",
        "text/*",
    ):
        answer = await browser.go("/auth/callback", Accept=accept)
        kind = "text/html; charset=utf-8" if accept == "text/*" else "application/problem+json"
        assert answer.headers["content-type"] == kind, accept
    other = await browser.go("/v1/nothing", Accept=HTML)
    assert other.headers["content-type"] == "application/problem+json"


async def test_an_issuer_that_is_away_is_said_on_a_page(
    tmp_path: Path, provider: RealProvider
) -> None:
    gone = {"jwks_uri": "http://127.0.0.1:9/keys", "issuer": "http://127.0.0.1:9"}
    async with site(tmp_path, provider, issuer=gone) as at:
        answer = await at.browser().go("/auth/login", Accept=HTML)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "<code>ISSUER_UNAVAILABLE</code>" in is_page(answer)
