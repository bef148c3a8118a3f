"""The register, weights from wherever a person can say that they are, what ranks hold, and orders
found by their key; in a real browser over a real gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from app.enginekit.runtime import Load, RankMemory
from tests.browser.staging import stage
from tests.browser.watching import has
from tests.enginekit.minimal_engine import until
from tests.http.full import FULL
from tests.idp.oidc_provider.running import RealProvider

pytestmark = [pytest.mark.anyio, pytest.mark.long]

NOBODY = "127.0.0.1:9"


def safetensors(path: Path, name: str = "w") -> Path:
    """Two by two float32, as any tool would write it."""
    header = {name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<4f", 1, 2, 3, 4))
    return path


async def test_an_engine_is_registered_changed_and_removed(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, at):
        page, dialog = board.page, board.page.locator("dialog")
        give = dialog.locator("footer button[type=submit]")
        await board.button("Register an engine …").click()
        await board.sees("“Id” is still empty.", "dialog")
        await has(give, aria_disabled="true")
        await page.get_by_label("Id", exact=True).fill("Node 7")
        await page.get_by_label("Addresses").fill(f"{NOBODY}\n{full.double.admin_address}")
        await page.get_by_label("Labels").fill("zone")
        await board.sees("The label “zone” has no value", "dialog")
        await page.get_by_label("Labels").fill("zone=eu\nrow=a=b")
        assert await board.barriers() == []
        await give.click()
        # What the API refuses stands at its field.
        await expect(page.get_by_label("Id", exact=True)).to_have_attribute("aria-invalid", "true")
        await page.get_by_label("Id", exact=True).fill(FULL)
        await page.get_by_label("Addresses").fill("192.0.2.1:9")
        await give.click()
        await expect(page.get_by_label("Addresses")).to_have_attribute("aria-invalid", "true")
        await board.sees("Line 1: ", "dialog")
        await page.get_by_label("Addresses").fill(NOBODY)
        await page.get_by_label("Credential").fill("none-such")
        await give.click()
        await expect(page.get_by_label("Credential")).to_have_attribute("aria-invalid", "true")
        await page.get_by_label("Credential").fill("")
        await give.click()
        await board.sees("ids are not reused", "dialog")
        await expect(page.get_by_label("Id", exact=True)).to_have_attribute("aria-invalid", "true")

        # One that is registered already is not registered once more unawares.
        await page.get_by_label("Id", exact=True).fill("node-7")
        await page.get_by_label("Addresses").fill(f"{NOBODY} {full.double.admin_address}")
        await give.click()
        await board.sees("is an address of the engine full", "dialog")
        assert await board.barriers() == []
        await page.get_by_label("Two engines share that address").check()
        await page.get_by_label("Reason").fill("a new node")
        await give.click()
        await board.heading("node-7")
        await board.sees("Registered more than once.")
        await expect(page.locator(".note").get_by_role("link", name="full")).to_be_visible()
        made = (await at.gate.get("/v1/engines/node-7")).json()
        assert made["labels"] == {"zone": "eu", "row": "a=b"}
        member = {"rank": 0, "admin": NOBODY, "control": full.double.admin_address}
        assert (made["members"], made["dialect"]) == ([member], "openengine")

        await board.button("Change …").click()
        await board.sees("Nothing is changed yet.", "dialog")
        await page.get_by_label("Addresses").fill("127.0.0.1:7")
        await page.get_by_label("Labels").fill("zone=us")
        assert await board.barriers() == []
        await give.click()
        await expect(dialog).to_have_count(0)
        await board.sees("zone=us", ".head")
        await expect(page.get_by_text("Registered more than once.")).to_have_count(0)
        changed = (await at.gate.get("/v1/engines/node-7")).json()
        assert (changed["generation"], changed["members"][0]["control"]) == (2, "127.0.0.1:7")

        # Somebody else changes it while the form is open.
        await board.button("Change …").click()
        await page.get_by_label("Labels").fill("zone=nowhere")
        body: dict[str, Any] = {"labels": {"zone": "eu"}}
        headers = {**at.gate.auth(), "If-Match": '"g2"'}
        await at.gate.http.patch("/v1/engines/node-7", json=body, headers=headers)
        await give.click()
        await board.sees("open it again to see what it is now", "dialog")
        await dialog.get_by_role("button", name="Close").last.click()

        await board.sees("zone=eu", ".head")
        await board.button("Remove …").click()
        await has(give, aria_disabled="true")
        await page.get_by_label("Type node-7 to confirm").fill("node")
        await has(give, aria_disabled="true")
        await page.get_by_label("Type node-7 to confirm").fill("node-7")
        await page.get_by_label("Reason").fill("its node is gone")
        assert await board.barriers() == []
        await give.click()
        await board.heading("Fleet")
        await expect(page.get_by_role("link", name="node-7")).to_have_count(0)
        audit = (await at.gate.get("/v1/audit?engine=node-7&action=remove_engine")).json()["items"]
        assert [one["note"] for one in audit] == ["its node is gone"]


async def test_what_was_found_is_not_changed_here_and_what_is_missing_is_said(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, at):
        found = {"chadburn/discovery": "rack"}
        assert (await at.gate.register("pod-0", labels=found)).status_code == 201
        await board.go("engines/pod-0")
        await board.sees("Found by rack", ".head")
        for name in ("Change …", "Remove …"):
            await has(board.button(name), aria_disabled="true")
            title = await board.button(name).get_attribute("title")
            assert title is not None
            assert title.startswith("It was found by “rack”"), title
            await board.button(name).click(force=True)
            await expect(board.page.locator("dialog")).to_have_count(0)
        assert await board.barriers() == []
        # An engine with an open operation stays.
        go = asyncio.Event()
        full.engine.script("commit", until(go), 1)
        order = await full.order("pause", {"mode": "drain"})
        await board.go(f"engines/{FULL}")
        await board.button("Remove …").click()
        await board.page.get_by_label(f"Type {FULL} to confirm").fill(FULL)
        await board.page.locator("dialog footer button[type=submit]").click()
        await board.sees("has not ended", "dialog")
        link = board.page.locator("dialog .note a")
        await has(link, title=order.json()["id"])
        go.set()


async def test_who_may_not_manage_engines_is_told_which_scope_is_missing(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider, "admin:read") as (board, _, _at):
        why = "Needs the scope admin:engines, which you do not have."
        await has(board.button("Register an engine …"), aria_disabled="true", title=why)
        await board.go(f"engines/{FULL}")
        for name in ("Change …", "Remove …"):
            await has(board.button(name), aria_disabled="true", title=why)


async def test_weights_from_where_a_person_can_say_that_they_are(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, _, at):
        page, dialog = board.page, board.page.locator("dialog")
        file = safetensors(tmp_path / "small.safetensors")
        await board.go(f"engines/{FULL}?order=update_weights")
        await page.get_by_label("What they are called").fill("v2")
        await page.get_by_label("Folder with the weights").fill("/models/v2")
        await board.sees("Checked against revision", "dialog")

        await page.get_by_label("A trainer's process group").check()
        await page.get_by_label("Address of the meeting point").fill("127.0.0.1")
        await page.get_by_label("Its port").fill("29500")
        await page.get_by_label("Name of the group").fill("g")
        await page.get_by_label("Processes in the group").fill("3")
        await page.get_by_label("The engine's first rank in it").fill("-1")
        await page.get_by_label("Tensors", exact=True).fill("w float32")
        await board.sees("takes a number from 0 on", "dialog")
        await page.get_by_label("The engine's first rank in it").fill("1")
        await board.sees("is not name type shape", "dialog")
        await page.get_by_label("Or take them from a safetensors file").set_input_files(file)
        await expect(page.get_by_label("Tensors", exact=True)).to_have_value("w float32 2x2")
        await board.sees("Checked against revision", "dialog")
        assert await board.barriers() == []
        await page.get_by_label("Tensors", exact=True).fill("w float33 2x2")
        await expect(page.get_by_label("Tensors", exact=True)).to_have_attribute(
            "aria-invalid", "true"
        )

        await page.get_by_label("Shared memory on its host").check()
        await page.get_by_label("Name of the object").fill("chadburn-1")
        await page.get_by_label("Its size in bytes").fill("16")
        await page.get_by_label("Tensors", exact=True).fill("w float32 2x2 0")
        await board.sees("Checked against revision", "dialog")
        assert await board.barriers() == []

        await page.get_by_label("A file of mine").check()
        await board.sees("“Safetensors file” is still empty.", "dialog")
        (tmp_path / "odd.safetensors").write_bytes(b"no tensors")
        await page.get_by_label("Safetensors file").set_input_files(tmp_path / "odd.safetensors")
        await board.sees("That is no safetensors file.", "dialog")
        await page.get_by_label("Safetensors file").set_input_files(file)
        await board.sees("1 tensor, 16 B", "dialog")
        await board.sees("Checked against revision", "dialog")
        assert await board.barriers() == []
        await page.get_by_label(f"Type {FULL} to confirm").fill(FULL)
        await dialog.get_by_role("button", name="Update weights", exact=True).click()
        await board.heading("Update weights")
        (given,) = (await at.gate.get("/v1/operations?kind=update_weights")).json()["items"]
        (tensor,) = given["request"]["source"]["inline"]["tensors"]
        sent = hashlib.sha256(struct.pack("<4f", 1, 2, 3, 4)).hexdigest()
        assert tensor == {"name": "w", "dtype": "float32", "shape": [2, 2], "sha256": sent}


async def test_what_each_rank_holds(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page, load = board.page, full.engine.load
        table = page.get_by_role("table", name="Memory")
        await board.go(f"engines/{FULL}")
        await board.sees("2 ranks in all.")
        await expect(table).to_have_count(0)  # it measures nothing, and so nothing is made up

        async def measured() -> Load:
            return replace(await load(), memory=(held(0, 3 << 30), held(1, 0)))

        full.engine.load = measured  # type: ignore[method-assign]
        rows = table.locator("tbody tr")
        await expect(rows).to_have_count(2, timeout=30_000)
        await expect(rows.nth(0)).to_have_text("03.0 GiB1.0 MiB0 B4.0 GiB")
        await expect(rows.nth(1)).to_have_text("10 B1.0 MiB3.0 GiB4.0 GiB")
        assert await board.barriers() == []


def held(rank: int, weights: int) -> RankMemory:
    return RankMemory(
        rank=rank,
        weights_bytes=weights,
        kv_cache_bytes=1 << 20,
        kept_bytes=(3 << 30) - weights,
        in_use_bytes=4 << 30,
    )


async def test_an_order_is_found_by_its_key(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, _):
        page = board.page
        for key in ("noon 1", "noon"):
            wait = {"Idempotency-Key": key, "Prefer": "wait=20"}
            assert (await full.order("flush-caches", {"caches": ["prefix"]}, **wait)).is_success
        await board.go("operations")
        await expect(page.locator("tbody tr")).to_have_count(2)
        await page.get_by_label("Key", exact=True).fill("noon 1")
        await board.button("Search").click()
        await expect(page.locator("tbody tr")).to_have_count(1)
        assert "idempotency_key=noon+1" in page.url
        assert await board.barriers() == []
        await page.get_by_label("Key", exact=True).fill("noo")
        await board.button("Search").click()
        await board.sees("No order fits.")
