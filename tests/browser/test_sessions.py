"""Sessions in a real browser: what it sends by itself, and what pages of other sites can do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from playwright.async_api import ConsoleMessage, Page, Route

from tests.browser.elsewhere import Elsewhere
from tests.http.logging_in import Site

pytestmark = pytest.mark.anyio

DRAIN = '{"mode":"drain"}'
PAUSE = "/v1/engines/none/pause"
SIBLING, STRANGER = "127.0.0.1", "localhost"
OTHERS = pytest.mark.parametrize("host", [SIBLING, STRANGER])


async def log_in(page: Page, at: Site, return_to: str = "/auth/session") -> None:
    await page.goto(f"{at.base}/auth/login?return_to={return_to}")
    await page.fill('input[name="login"]', "nadia")
    await page.fill('input[name="password"]', "any")
    await page.click('button[type="submit"]')
    # The provider asks whether the gateway may have what it asks for.
    await page.click('button[type="submit"]')
    await page.wait_for_url(f"{at.base}{return_to}")


async def shown(page: Page, base: str) -> None:
    """A page of the gateway's own origin."""

    async def answer(route: Route) -> None:
        await route.fulfill(content_type="text/html", body="<!doctype html><title>page</title>")

    await page.route(f"{base}/page", answer)
    await page.goto(f"{base}/page")


async def fetched(page: Page, url: str, **how: Any) -> Any:
    """Status and body, or the name of the error: then the browser shows the page neither."""
    return await page.evaluate(
        """async ([url, how]) => {
            try {
                const answer = await fetch(url, how);
                return [answer.status, await answer.json()];
            } catch (error) { return error.name; }
        }""",
        [url, how],
    )


async def of_own_page(page: Page, method: str, path: str, **how: Any) -> tuple[int, Any]:
    headers = {"X-Requested-With": "chadburn", "Content-Type": "application/json"}
    status, said = await fetched(page, path, method=method, headers=headers, **how)
    return status, said


async def test_a_person_logs_in_gives_an_order_and_logs_out(page: Page, at: Site) -> None:
    await log_in(page, at)
    await shown(page, at.base)
    assert await page.evaluate("document.cookie") == "", "no script sees the session"
    kept = {cookie["name"]: cookie for cookie in await page.context.cookies(at.base)}
    cookie = kept["chadburn-session"]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
    status, me = await of_own_page(page, "GET", "/v1/me")
    assert (status, me["subject"], me["kind"]) == (200, "nadia", "person")
    status, said = await of_own_page(page, "POST", PAUSE, body=DRAIN)
    assert (status, said["reason"]) == (404, "ENGINE_NOT_FOUND"), "so far it came"
    status, ended = await of_own_page(page, "POST", "/auth/logout")
    assert (status, ended["end_session_url"].startswith(at.provider.issuer)) == (200, True)
    status, said = await of_own_page(page, "GET", "/v1/me")
    assert (status, said["reason"]) == (401, "TOKEN_MISSING")


@pytest.mark.long
async def test_the_page_of_a_session_has_a_button_that_ends_it(page: Page, at: Site) -> None:
    faults: list[str] = []

    def hear(said: ConsoleMessage) -> None:
        if said.type == "error" and said.location["url"].startswith(at.base):
            faults.append(said.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: faults.append(str(error)))
    await log_in(page, at, "/auth/")
    await page.click("text=Log out")
    await page.wait_for_url(f"{at.provider.issuer}/session/end**")
    await page.goto(f"{at.base}/auth/")
    assert await page.inner_text("h1") == "Nobody is logged in"
    assert faults == []


async def test_events_reach_a_page_with_the_cookie_alone(page: Page, at: Site) -> None:
    await log_in(page, at)
    await shown(page, at.base)
    opened = await page.evaluate(
        """() => new Promise((resolve) => {
            const source = new EventSource("/v1/events");
            source.onopen = () => resolve("open");
            source.onerror = () => resolve("refused");
        })"""
    )
    assert opened == "open"


@OTHERS
async def test_forms_of_other_sites_are_refused(
    page: Page, at: Site, other_origins: Elsewhere, host: str
) -> None:
    await log_in(page, at)
    form = f'<form method="post" action="{at.base}{PAUSE}"><input name="mode" value="drain"></form>'
    other_origins.html = form
    await page.goto(other_origins.page(host))
    async with page.expect_response(lambda seen: seen.url.endswith(PAUSE)) as caught:
        await page.evaluate("document.forms[0].submit()")
    answer = await caught.value
    said = await answer.json()
    # A form of another site goes without the cookie, one of the same site with it.
    expected = (403, "CROSS_SITE_REFUSED") if host == SIBLING else (401, "TOKEN_MISSING")
    assert (answer.status, said["reason"]) == expected


@OTHERS
async def test_scripts_of_other_sites_change_and_read_nothing(
    page: Page, at: Site, other_origins: Elsewhere, host: str
) -> None:
    await log_in(page, at)
    await page.goto(other_origins.page(host))
    simple = {"method": "POST", "credentials": "include", "body": DRAIN}
    headers = {"X-Requested-With": "chadburn", "Content-Type": "application/json"}
    url = f"{at.base}{PAUSE}"
    # Nothing says that another origin may read an answer, or send a header of its own.
    assert await fetched(page, url, **simple, headers=headers) == "TypeError"
    assert await fetched(page, url, **simple) == "TypeError"
    assert await fetched(page, f"{at.base}/v1/me", credentials="include") == "TypeError"
    assert await fetched(page, url, **simple, mode="no-cors") == "TypeError"
    # What came with the cookie is known by name.
    refused = [row["reason"] for row in (await at.gate.get("/v1/audit")).json()["items"]]
    assert ("CROSS_SITE_REFUSED" in refused) == (host == SIBLING), refused


@OTHERS
async def test_pages_are_in_nobodys_frame(
    page: Page, at: Site, other_origins: Elsewhere, host: str
) -> None:
    await log_in(page, at)
    frames = "".join(
        f'<iframe src="{at.base}{path}"></iframe>'
        for path in ("/auth/session", "/auth/callback", "/docs", "/problems/")
    )
    other_origins.html = frames
    await page.goto(other_origins.page(host))

    def inner() -> list[str]:
        return [frame.url for frame in page.frames if frame is not page.main_frame]

    # What a frame may not show is put in its place some time after the page says that it is there.
    async with asyncio.timeout(30):
        while "" in inner() or len(inner()) < 4:  # noqa: ASYNC110 (no event tells of it)
            await asyncio.sleep(0.02)
    assert inner() == ["chrome-error://chromewebdata/"] * 4


async def test_after_a_login_the_person_is_where_the_gateway_is(page: Page, at: Site) -> None:
    for elsewhere in ("http://localhost:9/", "//localhost:9/", "/\\localhost:9/"):
        answer = await page.goto(f"{at.base}/auth/login?return_to={elsewhere}")
        assert answer is not None
        assert (answer.status, page.url.startswith(at.base)) == (400, True)
