"""What a page makes of its stream's ends and beginnings, and windows that must not drift apart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.browser.staging import stage
from tests.browser.watching import Dashboard, asked_for, log_in_at_provider
from tests.enginekit.minimal_engine import until
from tests.idp.oidc_provider.running import RealProvider
from tests.streams.reading import in_ledger

pytestmark = pytest.mark.anyio

NOTE = ".trouble .note"


async def test_a_stream_that_begins_anew_has_everything_read_anew(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page = board.page
        assert (await full.does("flush-caches", {"caches": ["prefix"]}))["done"]
        await board.go("engines/full")
        await board.sees("Flush caches", ".operations")
        await board.button("Live. Hold the picture still").click()
        await board.sees("The picture is held still.", ".trouble")
        done = await full.does("pause", {"mode": "drain", "reason": "while nobody looked"})
        # What happened meanwhile is not kept, so nobody can tell it.
        await in_ledger(
            tmp_path / "data",
            "DELETE FROM events",
            f"UPDATE ledger SET pruned_to = {await full.gate.rooms.ledger.events.horizon() + 1}",
        )
        await expect(page.locator(".head").get_by_text("Paused")).to_have_count(0)
        assert done["state"] == "succeeded"

        heard = await told_by_stream(board)
        await board.button("Held still. Show changes again as they happen").click()
        await board.sees("Paused", ".head")
        await board.sees("while nobody looked", ".operations")
        await expect(page.locator(NOTE)).to_have_count(0)
        assert await heard() == ["reset", "snapshot"]
        assert board.refused == []


async def told_by_stream(board: Dashboard) -> Callable[[], Awaitable[list[str]]]:
    """Names of the control events that the stream says from now on, as the page takes them."""
    await board.page.evaluate(
        """() => {
            window.said = [];
            const add = EventSource.prototype.addEventListener;
            EventSource.prototype.addEventListener = function (type, reader) {
                return add.call(this, type, (event) => {
                    if (["reset", "snapshot", "goodbye"].includes(type)) window.said.push(type);
                    reader(event);
                });
            };
        }"""
    )

    async def said() -> list[str]:
        return list(await board.page.evaluate("window.said"))

    return said


@pytest.mark.long
async def test_a_gateway_that_shuts_down_says_goodbye(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, _, at):
        page = board.page
        await board.sees("Serving", "tbody")
        at.gate.server.should_exit = True
        await board.sees("The gateway is restarting.", ".trouble")
        await expect(page.get_by_role("button", name="Not live")).to_be_visible()
        await expect(page.locator(NOTE)).to_contain_text(re.compile(r"What you see is .* old\."))
        await board.sees("Serving", "tbody")  # what was there stays to be seen
        assert await board.barriers() == []


@pytest.mark.long
async def test_a_stream_that_has_had_its_time_is_followed_by_another_without_a_word(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider, stream_max_s=8.0) as (board, full, _):
        page, opened = board.page, asked_for(board.page, r"/v1/events\?")
        await page.evaluate(
            """() => {
                window.words = new Set();
                new MutationObserver(() => {
                    for (const one of document.querySelectorAll(".live .badge, .trouble .note"))
                        window.words.add(one.innerText);
                }).observe(document.body, {subtree: true, childList: true, characterData: true});
            }"""
        )
        async with asyncio.timeout(60):
            while len(opened) < 2:  # noqa: ASYNC110 (no event tells of it)
                await asyncio.sleep(0.1)
        assert all("after=" in one for one in opened), "it goes on from where it was"
        await full.does("pause", {"mode": "drain"})
        await board.sees("Paused", "tbody")
        await expect(page.get_by_role("button", name="Live")).to_be_visible()
        assert set(await page.evaluate("[...window.words]")) <= {"Live", "Connecting"}


@pytest.mark.long
async def test_windows_of_one_person_keep_in_step(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, at):
        page = board.page
        other = await Dashboard.watched(page.context, board.base)
        await other.go("operations")
        await other.sees("No order fits.")

        # What one does the others see: the order, its end, the engine.
        go = asyncio.Event()
        full.engine.script("commit", until(go), 1)
        await board.go("engines/full?order=pause")
        await board.sees("Checked against revision", "dialog")
        await page.locator("dialog").get_by_role("button", name="Pause", exact=True).click()
        await board.heading("Pause")
        await other.sees("One order has been given since.")
        await other.button("Show").click()
        await other.sees("Running", "tbody")
        go.set()
        await other.sees("Succeeded", "tbody")

        # An engine that is removed leaves both.
        assert (await at.gate.register("brief")).status_code == 201
        await board.go("engines/brief")
        await board.heading("brief")
        await board.sees("Facts")
        found = (await at.gate.get("/v1/engines/brief")).json()
        headers = {**at.gate.auth(), "If-Match": f'"g{found["generation"]}"'}
        gone = await at.gate.http.delete("/v1/engines/brief", headers=headers)
        assert gone.is_success, gone.text
        await board.sees("There is no such engine, or none that you may see")

        # A logout is one of all of them.
        await other.page.locator(".menu > summary").click()
        await other.button("Log out").click()
        await other.page.wait_for_url(f"{at.provider.issuer}/session/end**")
        over = page.get_by_role("dialog", name="Your session has ended")
        await expect(over).to_be_visible()
        backdrop = "getComputedStyle(document.querySelector('dialog.sealed'), '::backdrop')"
        colour = await page.evaluate(f"{backdrop}.backgroundColor")
        assert re.fullmatch(r"rgb\(.*\)", colour), f"what is behind can be seen: {colour}"
        await other.page.close()
        assert [one for one in board.refused if not re.search("status of (40|501)", one)] == []


@pytest.mark.long
async def test_nothing_of_one_person_is_there_for_another(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, _, at):
        page = board.page
        await board.go("engines/full?order=update_weights")
        await page.get_by_label("Folder with the weights").fill("/models/of-nadia")
        await board.sees("is still empty", "dialog")
        await page.context.clear_cookies()
        await page.get_by_label("Folder with the weights").fill("/models/of-nadia-2")
        await page.get_by_label("What they are called").fill("v8")
        over = page.get_by_role("dialog", name="Your session has ended")
        await expect(over).to_be_visible(timeout=30_000)
        async with page.context.expect_page() as opened:
            await over.get_by_role("link", name="Log in").click()
        await log_in_at_provider(await opened.value, at.base, "omar", "/ui/signed-in")
        await expect(over).to_have_count(0)
        await expect(page.locator(".who")).to_have_text("omar")
        await expect(page.get_by_label("Folder with the weights")).to_have_value("")
        assert "nadia" not in await page.content()
        assert all("status of 401" in one for one in board.refused), board.refused
