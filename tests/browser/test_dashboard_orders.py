"""Orders that do not go straight to a good end, and what a person sees and does about them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from tests.browser.staging import stage
from tests.browser.watching import has
from tests.enginekit.minimal_engine import fault, slow, until
from tests.idp.oidc_provider.running import RealProvider

pytestmark = pytest.mark.anyio


def update(version: str) -> dict[str, Any]:
    source = {"disk": {"path": f"/models/{version}"}}
    return {"source": source, "weight_version": version, "pause": "drain"}


async def test_an_end_that_nobody_knows_is_stated_by_a_person(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, at):
        page, dialog = board.page, board.page.locator("dialog")
        full.engine.script("commit", until(asyncio.Event()), 1)
        operation = (await full.order("update-weights", update("v8"))).json()["id"]
        await board.go(f"operations/{operation}")
        await board.sees("Running", ".head")
        await expect(board.button("Cancel …")).not_to_have_attribute("aria-disabled", "true")
        await expect(board.button("Settle …")).to_have_count(0)

        await full.double.kill()  # and with it all that could be asked
        await board.sees("Outcome unknown", ".head")
        await board.sees("The outcome is not known.")
        await expect(page.locator(".head").get_by_text("Failed")).to_have_count(0)

        # There is nobody to be asked to cancel it.
        await has(board.button("Cancel …"), aria_disabled="true")

        await board.button("Settle …").click()
        await board.sees("Nothing is asked of the engine", "dialog")
        assert await board.barriers() == []
        state_it = dialog.get_by_role("button", name="State it")
        await has(state_it, aria_disabled="true")
        await dialog.get_by_label("It failed").check()
        await dialog.get_by_label("How you know").fill("the machine was swapped out")
        await state_it.click(force=True)
        await expect(dialog).to_be_visible()  # it takes the name too
        await dialog.get_by_label("Type full to confirm").fill("full")
        await state_it.click()

        await expect(dialog).to_have_count(0)
        await board.sees("Failed", ".head")
        await board.sees("Settled by a person", ".head")
        await board.sees("the machine was swapped out", ".note.bad")
        await board.sees("What it left behind at the engine is not known.")
        await board.sees("Settled by a person", ".timeline")
        for gone in ("Cancel …", "Settle …"):
            await expect(board.button(gone)).to_have_count(0)
        told = (await at.gate.get(f"/v1/operations/{operation}")).json()
        assert (told["state"], told["verification"]) == ("failed", "settled")
        assert full.double.rpcs["CancelOperation"] == 0, "it was away"
        await board.go("operations?state=failed")
        await board.sees("Settled by a person", "tbody")
        await board.go(f"audit?operation={operation}&action=settle")
        row = page.locator("tbody tr").filter(has_text="the machine was swapped out")
        await expect(row).to_contain_text("nadia")
        assert board.refused == []


async def test_an_order_waits_behind_others_and_is_seen_to_go_on(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page, go = board.page, asyncio.Event()
        full.engine.script("commit", until(go), 1)
        first = (await full.order("pause", {"mode": "drain"})).json()["id"]
        waits = {"caches": ["prefix"], "when_busy": "queue"}
        second = (await full.order("flush-caches", waits)).json()["id"]

        await board.go("engines/full?order=flush_caches")
        await board.sees("ENGINE_BUSY", "dialog")
        give = page.locator("dialog footer button[type=submit]")
        await has(give, aria_disabled="true")
        under_way = page.locator("dialog .plan").get_by_role("link")
        await has(under_way, href=f"/ui/operations/{first}")
        await page.get_by_label("Wait in line behind what is under way").check()
        await board.sees("It waits in line, number 2.", "dialog")
        await page.get_by_role("button", name="Flush caches (in line)").click()
        await board.heading("Flush caches")
        await board.sees("Queued, number 2 in line", ".head")
        await board.sees("Waits behind another order.")

        # The one before it gives up its place.
        key = {"Idempotency-Key": "in the way"}
        cancelled = await full.gate.http.post(
            f"/v1/operations/{second}/cancel", json={}, headers={**full.gate.auth(), **key}
        )
        assert cancelled.status_code == 200, cancelled.text
        await board.sees("Queued, number 1 in line", ".head")
        later = asyncio.Event()
        full.engine.script("commit", until(later), 1)
        go.set()
        await board.sees("Running", ".head")
        why = "This engine does not cancel flush caches once it is sent."
        await has(board.button("Cancel …"), aria_disabled="true", title=why)
        later.set()
        await board.sees("Succeeded", ".head")
        course = await page.locator(".timeline b").all_inner_texts()
        assert [one for one in course if one in ("Queued", "Sent to the engine")] == [
            "Queued",
            "Sent to the engine",
        ]
        assert course[-1] == "Succeeded"
        assert len(board.refused) > 0
        assert all("status of 409" in one for one in board.refused), board.refused


@pytest.mark.long
async def test_a_weight_update_that_one_rank_refuses(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page = board.page
        full.engine.script("commit", fault, 1)
        await board.go("engines/full?order=update_weights")
        await page.get_by_label("Folder with the weights").fill("/models/v8")
        await page.get_by_label("What they are called").fill("v8")
        await board.sees("Checked against revision", "dialog")
        await page.get_by_label("Type full to confirm").fill("full")
        await page.locator("dialog").get_by_role("button", name="Update weights").click()
        await board.heading("Update weights")
        await board.sees("Failed", ".head")
        said = page.locator(".note.bad")
        await expect(said).to_contain_text("rank 1 cannot")
        await expect(said).to_contain_text("What had been changed was taken back. Rank 1 failed.")
        lanes = page.locator(".lanes > li")
        await expect(lanes).to_have_count(2)
        await expect(lanes.nth(0)).to_contain_text("rolled back")
        await expect(lanes.nth(1)).to_contain_text("failed")
        await expect(lanes.nth(1)).to_contain_text("rank 1 cannot")
        assert await board.barriers() == []
        await board.go()
        await board.sees("v1", "tbody")
        await board.sees("Serving", "tbody")

        # And where it can't be taken back, the engine is not fit to serve.
        full.engine.script("rollback", fault, 0)
        done = await full.does(
            "update-weights",
            {"weight_version": "v9", "pause": "drain", "source": {"disk": {"path": "/models/v9"}}},
        )
        assert done["state"] == "failed"
        await board.sees("Weights inconsistent", "tbody")
        await board.go(f"operations/{done['id']}")
        await board.sees("Failed", ".head")
        await expect(page.locator(".lanes > li").nth(0)).to_contain_text("failed")
        await board.go("engines/full")
        await board.sees("It serves nothing until an update of its weights succeeds.")
        assert board.refused == []


@pytest.mark.long
async def test_an_adapter_is_loaded_and_unloaded(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page, dialog = board.page, board.page.locator("dialog")
        await board.go("engines/full")
        await board.sees("No adapter is loaded.")
        await has(board.button("Unload adapter"), title="No adapter is loaded.")
        await board.button("Load an adapter").click()
        await dialog.get_by_label("Name").fill("team/wit v2")
        await board.sees("“Folder with the adapter” is still empty.", "dialog")
        await dialog.get_by_label("Folder with the adapter").fill("/adapters/wit")
        await dialog.get_by_label("Number").fill("7")
        await board.sees("Checked against revision", "dialog")
        assert await board.barriers() == []
        await dialog.get_by_role("button", name="Load adapter", exact=True).click()
        await board.heading("Load adapter")
        await board.sees("Succeeded", ".head")

        await page.get_by_role("link", name="full", exact=True).click()
        await board.heading("full")
        row = page.locator("section[aria-labelledby=adapters] tbody tr")
        await expect(row).to_contain_text("team/wit v2")
        await expect(row).to_contain_text("7")
        assert full.engine.held[1].loras[0].name == "team/wit v2"
        await row.get_by_role("button", name="Unload").click()
        await expect(dialog.get_by_label("team/wit v2")).to_be_checked()
        await board.sees("Checked against revision", "dialog")
        await dialog.get_by_role("button", name="Unload adapter", exact=True).click()
        await board.heading("Unload adapter")
        await board.sees("Succeeded", ".head")
        await page.get_by_role("link", name="full", exact=True).click()
        await board.sees("No adapter is loaded.")
        assert full.engine.held[1].loras == ()

        # One that a rank does not take is loaded on none.
        full.engine.script("commit", fault, 1)
        await board.go("engines/full?order=load_lora")
        await dialog.get_by_label("Name").fill("broken")
        await dialog.get_by_label("Folder with the adapter").fill("/adapters/broken")
        await board.sees("Checked against revision", "dialog")
        await dialog.get_by_role("button", name="Load adapter", exact=True).click()
        await board.heading("Load adapter")
        await board.sees("Failed", ".head")
        await board.sees("rank 1 cannot", ".note.bad")
        await page.get_by_role("link", name="full", exact=True).click()
        await board.sees("No adapter is loaded.")
        full.engine.script("commit", slow(0), 1)
        assert board.refused == []
