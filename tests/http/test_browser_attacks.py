"""What other sites and people try with somebody's session: refused, each for its reason."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.auth.sessions.issuer_tokens import LOGOUT_EVENT
from app.domain.scopes import Scope
from app.http.middleware.context import SAFE_HEADERS
from app.http.route import EdgeRoute, declaration_of
from tests.http.browsing import PUBLIC, Browser
from tests.http.gateway import gateway
from tests.http.logging_in import Site, two_issuers
from tests.idp.oidc_provider.running import RealProvider

pytestmark = pytest.mark.anyio

KEY = {"Idempotency-Key": "k"}
ORDER = "/v1/engines/none/pause"


@pytest.fixture(scope="module")
async def at(
    tmp_path_factory: pytest.TempPathFactory, provider: RealProvider
) -> AsyncIterator[Site]:
    """One for all tests, none of which asks what was there before."""
    async with two_issuers(tmp_path_factory.mktemp("attacks"), provider) as made:
        yield made


async def logged_in(at: Site, name: str = "nadia") -> Browser:
    browser = at.browser()
    back = await browser.log_in(name, at.provider.issuer)
    assert back.status_code == 303, back.text
    return browser


OURS = {"Origin": PUBLIC, "Sec-Fetch-Site": "same-origin", "X-Requested-With": "chadburn"}
CROSS_SITE: list[dict[str, str | None]] = [
    {"Origin": None, "Sec-Fetch-Site": None},
    {"Origin": "https://evil.test"},
    {"Origin": "https://sibling.chadburn.test"},
    {"Origin": "https://chadburn.test.evil.test"},
    {"Origin": "https://test"},
    {"Origin": "http://chadburn.test"},
    {"Origin": "https://chadburn.test:8443"},
    {"Origin": "https://chadburn.test/"},
    {"Origin": "HTTPS://CHADBURN.TEST"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "none", "Origin": None},
    {"Sec-Fetch-Site": "", "Origin": None},
    {"Sec-Fetch-Site": "cross-site", "Origin": None},
    {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    },
    {"X-Requested-With": None},
    {"X-Requested-With": ""},
    {"X-Requested-With": "XMLHttpRequest"},
]


async def test_a_change_takes_the_gateway_s_own_origin_and_its_header(at: Site) -> None:
    browser = await logged_in(at)
    body = {"mode": "drain"}
    for headers in (
        OURS,
        {**OURS, "Sec-Fetch-Site": None},  # a browser that does not say it
        {**OURS, "Origin": None},
    ):
        answer = await ordered(browser, headers, json=body)
        assert answer == (404, "ENGINE_NOT_FOUND"), headers
    for changed in CROSS_SITE:
        headers = {**OURS, **changed}
        assert await ordered(browser, headers, json=body) == (403, "CROSS_SITE_REFUSED"), changed
    twice = [*OURS.items(), ("Origin", "https://evil.test"), *KEY.items()]
    assert await ordered(browser, dict(OURS), json=body, extra=twice) == (403, "CROSS_SITE_REFUSED")
    rows = [row for row in await at.audited("pause") if row["reason"] == "CROSS_SITE_REFUSED"]
    assert len(rows) == len(CROSS_SITE) + 1
    assert {row["principal"]["subject"] for row in rows} == {"nadia"}


async def ordered(
    browser: Browser, headers: dict[str, Any], extra: Any = None, **how: Any
) -> tuple[int, str]:
    given: Any = {name: value for name, value in headers.items() if value is not None}
    if extra is not None:
        cookie = f"{browser.session_cookie}={browser.session_id}"
        given = [("Host", "chadburn.test"), ("Cookie", cookie), *extra]
        answer = await browser.gate.http.post(ORDER, headers=given, **how)
    else:
        answer = await browser.send("POST", ORDER, headers={**given, **KEY}, **how)
    return answer.status_code, answer.json()["reason"]


async def test_every_change_of_the_application_takes_them(at: Site) -> None:
    browser = await logged_in(at)
    for route in at.gate.app.routes:
        assert isinstance(route, EdgeRoute)
        say = declaration_of(route)
        if say is None or say.need is None:
            continue
        path = re.sub(r"\{\w+(:path)?\}", "x", route.path)
        for method in sorted((route.methods or set()) - {"GET"}):
            for headers in ({}, {**OURS, "X-Requested-With": ""}, {**OURS, "Origin": "null"}):
                answer = await browser.send(method, path, headers=headers)
                assert answer.status_code == 403, (method, path)
                assert answer.json()["reason"] == "CROSS_SITE_REFUSED"


async def test_forms_of_other_sites(at: Site) -> None:
    """What a page can have a browser send without asking anybody first: three types of body, no
    header of its own, and its origin in it or not."""
    browser = await logged_in(at)
    for kind in (
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain",
    ):
        for origin in ({}, {"Origin": "null"}, {"Origin": "https://evil.test"}):
            for path in (ORDER, "/auth/logout"):
                answer = await browser.send(
                    "POST",
                    path,
                    headers={"Content-Type": kind, **origin},
                    content=b'{"mode":"drain"}',
                )
                assert answer.status_code in (400, 403), (kind, origin, path)
                assert "set-cookie" not in answer.headers
    assert (await browser.session())["signed_in"] is True


async def test_reads_for_other_sites(at: Site) -> None:
    browser = await logged_in(at)
    for method in ("GET", "HEAD"):
        assert (await browser.send(method, "/v1/me")).status_code == 200
        assert (await browser.send(method, "/v1/me", headers={"Sec-Fetch-Site": "none"})).is_success
        going = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        linked = {"Sec-Fetch-Site": "cross-site", **going}
        assert (await browser.send(method, "/v1/me", headers=linked)).status_code == 200
        for headers in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "https://sibling.chadburn.test"},
            {**linked, "Origin": "https://evil.test"},
            {**linked, "Sec-Fetch-Dest": "iframe"},
            {**linked, "Sec-Fetch-Dest": "object"},
            {**linked, "Sec-Fetch-Mode": "no-cors"},
            {**linked, "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
        ):
            for path in ("/v1/me", "/v1/events", "/auth/session"):
                answer = await browser.send(method, path, headers=headers)
                assert answer.status_code == 403, (method, path, headers)
                assert "access-control-allow-origin" not in answer.headers
    asked = {"Origin": "https://evil.test", "Access-Control-Request-Method": "POST"}
    preflight = await browser.send("OPTIONS", ORDER, headers=asked)
    assert preflight.status_code == 405
    assert not any(name.startswith("access-control") for name in preflight.headers)


async def test_whoever_shows_a_token_is_judged_by_it_alone(at: Site) -> None:
    browser = await logged_in(at)
    bearer = at.gate.auth(Scope.READ, subject="ada")
    for more in ({}, {"Origin": "https://evil.test", "Sec-Fetch-Site": "cross-site"}):
        answer = await browser.send("GET", "/v1/me", headers={**bearer, **more})
        assert (answer.status_code, answer.json()["subject"]) == (200, "ada")
    answer = await browser.send("POST", ORDER, headers={**bearer, **OURS, **KEY}, json={})
    assert (answer.status_code, answer.json()["reason"]) == (403, "INSUFFICIENT_SCOPE")
    for authorization in ("Bearer nonsense.of.some", "Bearer", "Basic YTpi", "DPoP x", ""):
        sent = {**OURS, "Authorization": authorization}
        answer = await browser.send("GET", "/v1/me", headers=sent)
        assert answer.status_code == 401, authorization
    browser.cookies[browser.session_cookie] = "nonsense"
    assert (await browser.send("GET", "/v1/me", headers=bearer)).status_code == 200


async def test_cookies_that_are_none(at: Site) -> None:
    browser = await logged_in(at)
    good, name = browser.session_id, browser.session_cookie
    for cookie in (
        f"{name}=",
        f"{name}={good[:-1]}",
        f"{name}={good}x",
        f"{name}={good.swapcase()}",
        f'{name}="{good}"',
        f"{name}={good}; {name}={good}",
        f"{name}={'A' * 43}; {name}={good}",
    ):
        headers = {"Host": "chadburn.test", "Cookie": cookie}
        answer = await at.gate.http.get("/v1/me", headers=headers)
        assert (answer.status_code, answer.json()["reason"]) == (401, "SESSION_ENDED"), cookie
        assert "error=" not in answer.headers["www-authenticate"]
    for cookie in (f"chadburn-session={good}", f"{name.lower()}={good}", f"x{name}={good}"):
        headers = {"Host": "chadburn.test", "Cookie": cookie}
        answer = await at.gate.http.get("/v1/me", headers=headers)
        assert (answer.status_code, answer.json()["reason"]) == (401, "TOKEN_MISSING"), cookie


async def test_a_session_that_was_planted_is_nobody_s(at: Site) -> None:
    """Fixation: the id that a browser has before a login is never the one it has after it."""
    attacker, victim = await logged_in(at, "mallory"), at.browser()
    planted = attacker.session_id
    victim.cookies[victim.session_cookie] = planted
    assert (await victim.log_in("nadia", at.provider.issuer)).status_code == 303
    assert victim.session_id != planted
    assert (await victim.session())["subject"] == "nadia"
    assert (await attacker.call("GET", "/v1/me")).json()["reason"] == "SESSION_ENDED"
    before = victim.session_id
    assert (await victim.log_in("nadia", at.provider.issuer)).status_code == 303
    assert victim.session_id != before
    victim.cookies[victim.session_cookie] = before
    assert (await victim.call("GET", "/v1/me")).json()["reason"] == "SESSION_ENDED"


async def test_pages_can_be_framed_by_nobody_and_run_nothing(at: Site) -> None:
    browser = at.browser()
    for path in ("/auth/login", "/problems", "/problems/session-ended", "/v1/me", "/auth/session"):
        answer = await browser.go(path)
        for name, value in SAFE_HEADERS.items():
            if name != "Cache-Control":
                assert answer.headers[name] == value, (path, name)
        policy = answer.headers["content-security-policy"]
        for directive in ("default-src 'none'", "frame-ancestors 'none'", "form-action 'none'"):
            assert directive in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["strict-transport-security"]
        assert not re.search(r"<script|<style|\sstyle=|\son\w+=", answer.text)


async def test_a_person_chooses_among_several_issuers(at: Site) -> None:
    browser = at.browser()
    page = await browser.go("/auth/login?return_to=/auth/session?x=%22%3E%3Cscript%3E")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" not in page.text
    assert page.text.count("<a href=") == 2
    assert not browser.cookies
    logins = (await browser.session())["logins"]
    assert [one["name"] for one in logins] == ["dev", "provider"]
    answer = await browser.go(logins[1]["url"])
    assert answer.headers["location"].startswith(f"{at.provider.issuer}/auth?")
    unknown = await browser.go("/auth/login?issuer=https://evil.test")
    assert (unknown.status_code, unknown.json()["reason"]) == (400, "LOGIN_ISSUER_UNKNOWN")


async def test_the_back_channel_takes_a_form_with_one_token_that_is_new(at: Site) -> None:
    path, issuer = "/auth/backchannel-logout", at.gate.issuer
    now = int(time.time())
    claims = {
        "iss": issuer.issuer,
        "aud": "dashboard",
        "iat": now,
        "exp": now + 60,
        "jti": "one",
        "sub": "nobody",
        "events": {LOGOUT_EVENT: {}},
    }
    head = {"alg": issuer.algorithm, "kid": issuer.key.kid, "typ": "logout+jwt"}
    token = issuer.sign(claims, head)
    http, form = at.gate.http, {"Content-Type": "application/x-www-form-urlencoded"}
    assert (await http.post(path, json={"logout_token": token})).status_code == 415
    assert (await http.get(path)).status_code == 405
    for body in (
        b"",
        b"logout_token=",
        f"logout_token={token}&logout_token={token}".encode(),
        "logout_token=é".encode(),
        b"logout_token=" + b"x" * 70_000,
        b"&".join(b"a=1" for _ in range(50)),
    ):
        answer = await http.post(path, content=body, headers=form)
        assert (answer.status_code, answer.json()["reason"]) == (400, "LOGOUT_TOKEN_REFUSED")
    taken = await http.post(path, data={"logout_token": token, "more": "of the issuer's"})
    assert (taken.status_code, taken.content) == (200, b"")
    assert taken.headers["cache-control"] == "no-store"
    again = await http.post(path, data={"logout_token": token})
    assert (again.status_code, again.json()["reason"]) == (400, "LOGOUT_TOKEN_REFUSED")
    ended = await at.browser().call("POST", "/auth/logout", headers={"Cookie": "x=y"})
    assert ended.json() == {"end_session_url": None}
    over = at.browser()
    over.cookies[over.session_cookie] = "A" * 43
    assert (await over.call("POST", "/auth/logout")).json() == {"end_session_url": None}
    assert not over.cookies


async def test_another_host_gets_nothing(at: Site) -> None:
    browser = await logged_in(at)
    for host in ("evil.test", "sibling.chadburn.test", "chadburn.test.evil.test"):
        for path in ("/auth/login", "/auth/session", "/auth/callback?state=x&code=y", "/v1/me"):
            answer = await browser.send("GET", path, headers={"Host": host})
            assert (answer.status_code, answer.json()["reason"]) == (421, "HOST_NOT_ALLOWED")


async def test_without_a_login_in_the_settings_there_is_none(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", registered=False) as gate:
        for path in ("/", "/auth/login", "/auth/callback?code=x", "/auth/callback/dev"):
            answer = await gate.http.get(path)
            assert (answer.status_code, answer.json()["reason"]) == (404, "ROUTE_NOT_FOUND"), path
        form = {"logout_token": "x"}
        assert (await gate.http.post("/auth/backchannel-logout", data=form)).status_code == 404
        session = await gate.http.get("/auth/session", headers={"Cookie": "chadburn-session=x"})
        assert session.json() == {
            "signed_in": False,
            "issuer": None,
            "subject": None,
            "client_id": None,
            "scopes": [],
            "logins": [],
        }
        cookie = {"Cookie": f"chadburn-session={'A' * 43}"}
        answer = await gate.http.get("/v1/me", headers=cookie)
        assert (answer.status_code, answer.json()["reason"]) == (401, "TOKEN_MISSING")
