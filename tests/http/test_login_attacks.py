"""What people, other sites and issuers try with logins: refused, each for its reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pytest

from tests.http.browsing import PUBLIC, Browser, at_provider
from tests.http.logging_in import Site, site, two_issuers
from tests.idp.oidc_provider.running import INFERENCE, RealProvider

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def at(
    tmp_path_factory: pytest.TempPathFactory, provider: RealProvider
) -> AsyncIterator[Site]:
    """One for all tests, none of which asks what was there before."""
    async with two_issuers(tmp_path_factory.mktemp("logins"), provider) as made:
        yield made


ELSEWHERE = [
    "https://evil.test",
    "//evil.test",
    "///evil.test",
    "/\\evil.test",
    "\\/evil.test",
    "/\t/evil.test",
    "/\n/evil.test",
    "/%0a/evil.test",
    "/%2f%2fevil.test",
    "/a//b",
    "/../evil",
    "evil.test",
    "",
    "javascript:alert(1)",
    "/auth/login",
    "/auth/logout",
    "/auth/callback?x=1",
    "/ü",
    "/" + "a" * 512,
]


async def test_after_a_login_nobody_is_sent_elsewhere(at: Site) -> None:
    browser = at.browser()
    for target in ELSEWHERE:
        for issuer in ({}, {"issuer": at.provider.issuer}):
            query = urlencode({**issuer, "return_to": target})
            answer = await browser.go(f"/auth/login?{query}")
            assert answer.status_code == 400, target
            assert answer.json()["reason"] == "RETURN_TO_REFUSED"
            assert not browser.cookies


async def callback(at: Site, browser: Browser, name: str = "nadia") -> str:
    """Where the issuer sends the browser, which has not been there yet."""
    return await at_provider(browser, await browser.begin(at.provider.issuer), name)


def changed(url: str, **query: str | None) -> str:
    parts = urlsplit(url)
    given: dict[str, str | None] = {
        name: values[0] for name, values in parse_qs(parts.query).items()
    }
    kept = {name: value for name, value in {**given, **query}.items() if value is not None}
    return parts._replace(query=urlencode(kept)).geturl()


async def refused(browser: Browser, url: str) -> str:
    answer = await browser.come_back(url)
    assert answer.status_code == 400, answer.text
    assert browser.session_cookie not in browser.cookies
    return str(answer.json()["reason"])


async def test_an_answer_counts_once_and_in_its_own_browser_alone(at: Site) -> None:
    browser, other = at.browser(), at.browser()
    url = await callback(at, browser)
    assert await refused(other, url) == "LOGIN_UNKNOWN"  # login CSRF, or a code that was stolen
    await other.begin(at.provider.issuer)
    assert await refused(other, url) == "LOGIN_UNKNOWN"
    for wrong in (None, "", "x", "x" * 5000):
        assert await refused(browser, changed(url, state=wrong)) == "LOGIN_UNKNOWN"
    assert (await browser.come_back(f"{url}&state=another")).status_code == 422
    kept = dict(browser.cookies)
    assert (await browser.come_back(url)).status_code == 303
    assert await refused_again(browser, url) == "LOGIN_UNKNOWN", "its cookie is gone"
    browser.cookies |= kept
    assert await refused_again(browser, url) == "LOGIN_REPLAYED"
    other.cookies = kept
    assert await refused(other, url) == "LOGIN_REPLAYED"


async def refused_again(browser: Browser, url: str) -> str:
    before = browser.cookies.pop(browser.session_cookie, "")
    reason = await refused(browser, url)
    browser.cookies[browser.session_cookie] = before
    return reason


async def test_a_login_s_cookie_is_what_the_gateway_made_it(at: Site) -> None:
    browser, other = at.browser(), at.browser()
    url = await callback(at, browser)
    (name,) = browser.login_cookies
    good = browser.cookies[name]
    await other.begin(at.provider.issuer)
    (foreign,) = (other.cookies[one] for one in other.login_cookies)
    turned = ("A" if good[40] != "A" else "B").join((good[:40], good[41:]))
    for value in ("", "x", "%", foreign, turned, good[:-4], f"{good}; {name}={good}"):
        browser.cookies[name] = value
        assert await refused(browser, url) == "LOGIN_UNKNOWN", value
    browser.cookies[name] = good
    assert (await browser.come_back(url)).status_code == 303


async def test_logins_that_are_given_up_do_not_pile_up(at: Site) -> None:
    browser = at.browser()
    for number in range(20):
        await browser.begin(at.provider.issuer)
        assert len(browser.login_cookies) == number % 8 + 1
    assert (await browser.come_back(await callback(at, browser))).status_code == 303


async def test_issuers_are_not_mixed_up(at: Site) -> None:
    """With two of them each answer has to name its own (RFC 9207)."""
    for wrong in (at.gate.issuer.issuer, f"{at.provider.issuer}/", "", None):
        browser = at.browser()
        url = await callback(at, browser)
        assert await refused(browser, changed(url, iss=wrong)) == "LOGIN_ISSUER_MISMATCH"
        assert await refused(browser, url) == "LOGIN_REPLAYED", "it is spent"
    browser = at.browser()
    url = await callback(at, browser)
    elsewhere = url.replace("/auth/callback?", "/auth/callback/dev?")
    assert await refused(browser, elsewhere) == "LOGIN_ISSUER_MISMATCH"


async def test_a_path_of_its_own_for_an_issuer_that_does_not_name_itself(
    tmp_path: Path, provider: RealProvider
) -> None:
    async with site(tmp_path, provider, login={"own_path": True}) as at:
        browser = at.browser()
        url = await callback(at, browser)
        assert url.startswith(f"{PUBLIC}/auth/callback/provider?")
        for path in ("/auth/callback?", "/auth/callback/other?"):
            misled = at.browser()
            sent = await callback(at, misled)
            wrong = sent.replace("/auth/callback/provider?", path)
            assert await refused(misled, wrong) == "LOGIN_ISSUER_MISMATCH"
        assert (await browser.come_back(url)).status_code == 303


async def test_an_answer_that_is_no_login(at: Site) -> None:
    browser = at.browser()
    url = await callback(at, browser)
    denied = changed(url, code=None, error="access_denied", error_description="<b>no</b>")
    assert await refused(browser, denied) == "LOGIN_DENIED"
    assert "<b>" not in browser.seen[-1].text
    browser = at.browser()
    assert await refused(browser, changed(await callback(at, browser), code=None)) == "LOGIN_FAILED"
    browser = at.browser()
    url = changed(await callback(at, browser), code="made-up")
    assert await refused(browser, url) == "LOGIN_FAILED"
    rows = (await at.audited("finish_login"))[:2]
    assert [row["reason"] for row in rows] == ["LOGIN_FAILED"] * 2


async def test_made_up_answers_have_an_end(tmp_path: Path, provider: RealProvider) -> None:
    """A stranger may begin logins. What it makes up is not carried to the issuer, nor written down,
    for ever."""
    async with site(tmp_path, provider, max_refusals_per_minute=4) as at:
        told = []
        for _ in range(7):
            browser = at.browser()
            asked = dict(parse_qsl(urlsplit(await browser.begin(provider.issuer)).query))
            answer = {"state": asked["state"], "code": "made-up", "iss": provider.issuer}
            back = await browser.come_back(f"/auth/callback?{urlencode(answer)}")
            told.append(back.json()["reason"])
        assert told == ["LOGIN_FAILED"] * 4 + ["TOO_MANY_NEW_TOKENS"] * 3
        assert len(await at.audited("finish_login")) == 4


async def test_a_code_of_another_login_is_no_use(at: Site) -> None:
    """Injection: the attacker's own code, in the victim's login. PKCE ties it to the attacker's."""
    victim, attacker = at.browser(), at.browser()
    hers = await callback(at, victim)
    his = await callback(at, attacker, "mallory")
    code = parse_qs(urlsplit(his).query)["code"][0]
    assert await refused(victim, changed(hers, code=code)) == "LOGIN_FAILED"


async def test_a_login_that_gives_no_permission_here_gives_no_session(
    tmp_path: Path, provider: RealProvider
) -> None:
    async with site(tmp_path, provider, login={"scopes": ()}) as at:
        browser = at.browser()
        back = await browser.come_back(await callback(at, browser))
        assert (back.status_code, back.json()["reason"]) == (403, "LOGIN_FORBIDDEN")
        assert browser.session_cookie not in browser.cookies
        (row,) = await at.audited("finish_login")
        assert (row["outcome"], row["principal"]["subject"]) == ("denied", "nadia")
    inference = {"scopes": ("inference:generate",), "resource": INFERENCE}
    (tmp_path / "2").mkdir()
    async with site(tmp_path / "2", provider, login=inference) as at:
        browser = at.browser()
        assert await refused(browser, await callback(at, browser)) == "LOGIN_FAILED"
