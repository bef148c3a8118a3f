"""The dashboard in a real browser, over a real gateway, with people of a certified provider."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from app.domain.facts import LoraFact
from app.enginekit.runtime import Order, RuntimeFault
from tests.browser.staging import stage
from tests.browser.watching import Dashboard, has
from tests.enginekit.minimal_engine import fault, slow, until
from tests.http.logging_in import BRIEF
from tests.idp.oidc_provider.running import RealProvider

pytestmark = pytest.mark.anyio

EVIL = '<img src=x onerror="window.hurt=1">'


async def test_a_pause_from_the_fleet_to_the_audit(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page, go = board.page, asyncio.Event()
        full.engine.script("commit", until(go), 1)
        await board.sees("Serving", "tbody")
        await expect(page.get_by_role("button", name="Live")).to_be_visible()
        assert await board.barriers() == []
        other = await Dashboard.watched(page.context, board.base)  # a second window of the person
        await other.go("engines/full")

        await page.get_by_role("link", name="full", exact=True).click()
        await board.heading("full")
        await has(board.button("Resume"), aria_disabled="true", title="Nothing is paused.")
        await board.button("Pause").click()
        await board.sees("requests finish, and holds new ones until it is resumed.", "dialog")
        await board.sees("Checked against revision", "dialog")
        assert await board.barriers() == []
        await page.get_by_label("Reason").fill("new weights tonight")
        await page.locator("dialog").get_by_role("button", name="Pause", exact=True).click()

        await board.heading("Pause")
        await board.sees("Running")
        await expect(page.locator(".lanes > li")).to_have_count(2)
        await board.sees("prepared")
        await other.sees("Pause", ".underway")
        assert await board.barriers() == []
        go.set()
        await board.sees("Succeeded")
        await board.sees("Verified: the engine acknowledged it")
        sequences = await page.locator(".timeline > li").count()
        ended = (await full.gate.get("/v1/operations?kind=pause")).json()["items"][0]
        assert sequences == ended["sequence"], "none is missing, and none there twice"
        await other.sees("Paused")
        await expect(other.button("Resume")).not_to_have_attribute("aria-disabled", "true")
        await other.faultless()
        await other.page.close()

        await page.get_by_role("link", name="Ledger").first.click()
        await board.heading("Ledger")
        await board.sees("new weights tonight", "tbody")
        assert await board.barriers() == []
        await page.get_by_label("Order").select_option("resume")
        await board.button("Search").click()
        await board.sees("No order fits.")
        await page.get_by_role("link", name="Audit").click()
        await board.heading("Audit")
        await board.sees("new weights tonight", "tbody")
        assert await board.barriers() == []
        assert board.refused == []


async def test_what_can_not_be_taken_back_is_typed(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    """And all of it by keyboard."""
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page = board.page
        await board.go("engines/full?order=abort_requests")
        await page.get_by_label("All of them").focus()
        await page.keyboard.press("Space")
        await board.sees("Ends all requests", "dialog")
        give = page.locator("dialog footer button[type=submit]")
        await has(give, aria_disabled="true")
        await page.get_by_label("Type full to confirm").focus()
        await page.keyboard.press("Enter")
        assert full.double.rpcs["Abort"] == 0
        await page.keyboard.type("full")
        await expect(give).not_to_have_attribute("aria-disabled", "true")
        await page.keyboard.press("Enter")
        await board.heading("Abort requests")
        await board.sees("Succeeded")
        await board.go("engines/full?order=pause")
        await board.sees("Checked against", "dialog")
        await page.keyboard.press("Escape")
        await expect(page.locator("dialog")).to_have_count(0)


async def test_a_session_that_ends_takes_nothing_of_what_was_typed(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, _, at):
        page = board.page
        await board.go("engines/full?order=update_weights")
        await page.get_by_label("Folder with the weights").fill("/models/v8")
        await page.get_by_label("What they are called").fill("v8")
        await board.sees("Checked against", "dialog")
        await page.context.clear_cookies(name="chadburn-session")
        await page.get_by_label("What they are called").fill("v8.1")
        over = page.get_by_role("dialog", name="Your session has ended")
        await expect(over).to_be_visible()
        assert await board.barriers() == []
        async with page.context.expect_page() as opened:
            await over.get_by_role("link", name="Log in").click()
        tab = await opened.value
        await tab.click('button[type="submit"]')  # the provider knows who it is, and asks whether
        await tab.wait_for_url(f"{at.base}/ui/signed-in")
        await expect(tab.get_by_role("heading", name="You are logged in")).to_be_visible()
        await expect(over).to_have_count(0)
        assert await page.get_by_label("Folder with the weights").input_value() == "/models/v8"
        assert await page.get_by_label("What they are called").input_value() == "v8.1"
        await board.sees("Checked against", "dialog")
        await page.get_by_label("Type full to confirm").fill("full")
        await page.locator("dialog").get_by_role("button", name="Update weights").click()
        await board.heading("Update weights")
        assert all("status of 401" in one for one in board.refused), board.refused


FOCUS = """() => {
    const now = document.activeElement, seen = getComputedStyle(now);
    return [
        now.getAttribute("aria-label") ?? now.labels?.[0]?.innerText ?? now.innerText,
        seen.outlineStyle !== "none" || now.tabIndex === -1,
    ];
}"""
"""What has the focus, and whether that can be seen."""


async def tab_to(board: Dashboard, name: str, most: int = 60) -> None:
    """As somebody without a mouse comes to it; all that lies on the way has to show the focus."""
    passed = []
    for _ in range(most):
        await board.page.keyboard.press("Tab")
        said, visible = await board.page.evaluate(FOCUS)
        passed.append(said.strip())
        assert visible, f"the focus can't be seen on {said!r}"
        if passed[-1] == name:
            return
    pytest.fail(f"{name!r} was not among {passed}")


@pytest.mark.long
async def test_an_order_is_given_and_followed_without_a_mouse(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page, keyboard = board.page, board.page.keyboard
        await board.sees("Serving", "tbody")
        await tab_to(board, "full")
        await keyboard.press("Enter")
        await board.heading("full")
        await expect(board.button("Pause")).to_be_visible()
        await tab_to(board, "Pause")
        await keyboard.press("Enter")
        await board.sees("Checked against revision", "dialog")
        await keyboard.press("Escape")
        await expect(page.locator("dialog")).to_have_count(0)
        assert (await page.evaluate(FOCUS))[0] == "Pause", "the focus is where it was"
        await keyboard.press("Enter")
        await board.sees("Checked against revision", "dialog")
        await tab_to(board, "Let running requests finish")
        await keyboard.press("ArrowDown")
        await expect(page.get_by_label("Freeze running requests until resumed")).to_be_checked()
        await tab_to(board, "Reason")
        await keyboard.type("by keyboard")
        await board.sees("Checked against revision", "dialog")
        await tab_to(board, "Pause")
        await keyboard.press("Enter")
        await board.heading("Pause")
        await board.sees("Succeeded", ".head")
        told = (await full.gate.get("/v1/operations?kind=pause")).json()["items"][0]
        assert (told["request"]["mode"], told["reason"]) == ("keep", "by keyboard")
        await tab_to(board, "Skip to the page")
        await keyboard.press("Enter")
        await tab_to(board, "full")
        await keyboard.press("Enter")
        await board.heading("full")
        await board.sees("Paused", ".head")
        assert board.refused == []


@pytest.mark.long
async def test_a_token_that_runs_out_over_a_half_filled_form(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    """Its cookie is there still, and nothing renews what it stood for."""
    async with stage(chromium, tmp_path, provider, client_id=BRIEF, issuer={"leeway_s": 0}) as (
        board,
        full,
        at,
    ):
        page = board.page
        await board.go("engines/full?order=update_weights")
        await page.get_by_label("Folder with the weights").fill("/models/v8")
        over = page.get_by_role("dialog", name="Your session has ended")
        await expect(over).to_be_visible(timeout=60_000)
        assert full.double.rpcs["UpdateWeights"] == 0
        async with page.context.expect_page() as opened:
            await over.get_by_role("link", name="Log in").click()
        tab = await opened.value
        await tab.click('button[type="submit"]')
        await tab.wait_for_url(f"{at.base}/ui/signed-in")
        await expect(over).to_have_count(0)
        assert await page.get_by_label("Folder with the weights").input_value() == "/models/v8"


@pytest.mark.long
async def test_a_reader_sees_what_is_missing(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider, "admin:read") as (board, full, _):
        page = board.page
        await full.does("pause", {"mode": "drain"})
        await board.sees("Paused", "tbody")
        await board.go("engines/full")
        for name, scope in (("Resume", "admin:pause"), ("Update weights", "admin:weights")):
            why = f"Needs the scope {scope}, which you do not have."
            await has(board.button(name), aria_disabled="true", title=why)
            await board.button(name).click(force=True)
            await expect(page.locator("dialog")).to_have_count(0)
        await board.sees("Needs the scope admin:profile, which you do not have.")
        assert await board.barriers() == []
        await board.go("audit")
        await board.sees("You may not read the audit")
        assert await board.barriers() == []
        for path, said in (
            ("engines/none", "There is no such engine, or none that you may see"),
            ("operations/none", "There is no such operation, or none that you may see"),
            ("nowhere", "The address leads nowhere."),
        ):
            await board.go(path)
            await board.sees(said)
            assert await board.barriers() == []
        assert all("status of 404" in one for one in board.refused), board.refused


async def evil(_order: Order, _rank: int) -> None:
    raise RuntimeFault("RANK_BROKEN", EVIL)


async def test_what_others_wrote_is_text(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, at):
        page = board.page
        observed = full.engine.observation
        full.engine.observation = replace(
            observed,
            loras=(LoraFact(EVIL, 7),),
            weights=replace(observed.weights, version=EVIL),
        )
        await board.go("engines/full")
        found = await at.gate.get("/v1/engines/full")
        changed = await at.gate.http.patch(
            "/v1/engines/full",
            json={"labels": {"evil": EVIL}},
            headers={**at.gate.auth(), "If-Match": f'"g{found.json()["generation"]}"'},
        )
        assert changed.status_code == 200, changed.text
        key = {"Idempotency-Key": EVIL, "Prefer": "wait=20"}
        done = await full.order("pause", {"mode": "drain", "reason": EVIL}, **key)
        operation = done.json()["id"]
        full.engine.script("prepare", evil, 1)
        failed = (await full.does("flush-caches", {"caches": ["prefix"]}))["id"]
        operations = [f"operations/{operation}", f"operations/{failed}"]
        for path in ("", "engines/full", *operations, "operations", "audit"):
            await board.go(path)
            await board.sees(EVIL)
            assert await page.locator("main img").count() == 0
        assert await page.evaluate("window.hurt") is None


@pytest.mark.long
async def test_several_engines_at_once(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, at):
        page, dialog = board.page, board.page.locator("dialog")
        assert (await at.gate.register("e1", labels={"zone": "eu"})).status_code == 201
        assert (await at.gate.register("gone", labels={"zone": "us"})).status_code == 201
        await at.gate.rooms.fleet.discover("e1")
        await full.does("pause", {"mode": "drain"})
        full.engine.script("commit", fault, 1)
        await page.get_by_role("combobox", name="Label").select_option("zone=eu")
        await board.sees("1 engine shown")
        assert "label=zone%3Deu" in page.url
        await page.get_by_role("combobox", name="Label").select_option("")
        await page.get_by_label("Choose all 3 shown").check()
        await board.sees("3 engines chosen")
        await board.button("Resume").click()
        await expect(dialog.locator("tr.left-out")).to_have_count(2)
        await board.sees("Nothing is paused.", "dialog")
        await board.sees("Lifts pause", "dialog")
        assert await board.barriers() == []
        await dialog.get_by_role("button", name="Close").last.click()

        await board.button("Flush caches").click()
        await board.sees("Empties the caches prefix", "dialog")
        await expect(dialog.locator("tr.left-out")).to_have_count(0)
        await dialog.get_by_role("button", name="Flush caches: 3 engines").click()
        await board.sees("2 of 3 succeeded. 1 did not.", "dialog")
        assert await board.barriers() == []
        full.engine.script("commit", slow(0), 1)
        await dialog.get_by_role("button", name="Try 1 engine again …").click()
        await dialog.get_by_role("button", name="Flush caches: 1 engine").click()
        await board.sees("1 of 1 succeeded.", "dialog")


@pytest.mark.long
async def test_a_freeze_is_set_met_and_lifted(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, _, _):
        page = board.page
        await board.go("engines/full")
        await board.button("Freeze …").click()
        await page.get_by_label("Reason (needed)").fill("release night")
        await page.locator("dialog").get_by_role("button", name="Freeze", exact=True).click()
        await board.sees("Frozen until")
        await board.button("Pause").click()
        await board.sees("ENGINE_FROZEN", "dialog")
        await page.get_by_label("Order it in spite of the freeze").check()
        await board.sees("Checked against revision", "dialog")
        await page.locator("dialog").get_by_role("button", name="Pause", exact=True).click()
        await board.heading("Pause")
        await board.sees("Succeeded")
        await board.go("engines/full")
        await board.button("Lift the freeze …").click()
        await board.button("Lift it").click()
        await expect(page.get_by_text("Frozen until")).to_have_count(0)
        assert all("status of 409" in one for one in board.refused), board.refused
