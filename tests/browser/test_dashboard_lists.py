"""Lists: what a file that is saved has in it, and pages over much more than anybody looks at."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from tests.benchmarks.long_ledger import filled
from tests.browser.staging import stage
from tests.browser.watching import Dashboard, asked_for
from tests.e2e.processes import Process, cleaned
from tests.http.gateway import Gateway
from tests.idp.oidc_provider.running import RealProvider

pytestmark = pytest.mark.anyio

FORMULA = '=HYPERLINK("http://evil")'
MANY = 10_000
ENGINES = 200
PAGE = 50


async def saved(board: Dashboard, kind: str) -> str:
    async with board.page.expect_download() as coming:
        await board.button(f"Export {kind}").click()
    download = await coming.value
    await board.sees("Saved", ".export")
    assert download.suggested_filename.endswith(f".{kind.lower()}")
    return (await download.path()).read_text(encoding="utf-8")


async def of_api(gate: Gateway, path: str, **query: str) -> list[dict[str, Any]]:
    items, token = [], None
    while True:
        asked = {**query, "page_size": "1000", **({"page_token": token} if token else {})}
        answer = await gate.http.get(path, params=asked, headers=gate.auth())
        assert answer.status_code == 200, answer.text
        page = answer.json()
        items += page["items"]
        token = page.get("next_page_token")
        if not token:
            return items


async def test_what_is_saved_is_what_the_api_says(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    async with stage(chromium, tmp_path, provider) as (board, full, at):
        for verb, body in (
            ("pause", {"mode": "drain", "reason": 'two\nlines, "quoted"'}),
            ("flush-caches", {"caches": ["prefix"], "reason": "Zürich, 東京"}),
            ("flush-caches", {"caches": ["prefix"], "reason": FORMULA}),
        ):
            await full.does(verb, body)
        wanted = {
            "operations": ("v1/operations", {"kind": "flush_caches"}),
            "audit": ("v1/audit", {"action": "pause"}),
        }
        for page, (path, query) in wanted.items():
            (name, value) = next(iter(query.items()))
            await board.go(f"{page}?{name}={value}")
            await expect(board.page.locator("tbody tr").first).to_be_visible()
            told = await of_api(at.gate, f"/{path}", **query)
            assert told
            assert json.loads(await saved(board, "JSON"))["items"] == told
            rows = list(csv.DictReader((await saved(board, "CSV")).splitlines(keepends=True)))
            assert [row["id"] for row in rows] == [str(one["id"]) for one in told]
            headers = {**at.gate.auth(), "Accept": "text/csv"}
            answer = await at.gate.http.get(f"/{path}", params=query, headers=headers)
            assert list(csv.DictReader(answer.text.splitlines(keepends=True))) == rows
            if page == "operations":
                assert [row["state"] for row in rows] == [one["state"] for one in told]
                assert [row["reason"] for row in rows] == [f"'{FORMULA}", "Zürich, 東京"]
        assert board.refused == []


@pytest.mark.long
async def test_ten_thousand_orders_are_read_page_by_page(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'long.db'}"
    await (await filled(url, MANY)).close()
    async with stage(
        chromium,
        tmp_path,
        provider,
        database_url=url,
        observe_interval_s=600.0,
        operation_retention_days=400,
    ) as (
        board,
        full,
        at,
    ):
        page, asked = board.page, asked_for(board.page, r"/v1/operations\?")
        await page.get_by_role("link", name="Ledger").first.click()
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(PAGE)
        await page.evaluate("document.querySelector('tbody tr').kept = 'the first'")
        pages = 21
        for number in range(2, pages + 1):
            await board.button("Show more").click()
            await expect(rows).to_have_count(number * PAGE)
        assert len(asked) == pages, "a page is asked for once, and none that nobody asked for"
        assert all(f"page_size={PAGE}" in one for one in asked)
        kept = await page.evaluate("document.querySelector('tbody tr').kept")
        assert kept == "the first", "what is there is not drawn anew"
        links = (
            "rows => rows.map(row => row.querySelector('a').getAttribute('href').split('/').pop())"
        )
        shown = await rows.evaluate_all(links)
        told = await of_api(at.gate, "/v1/operations")
        assert shown == [one["id"] for one in told][: pages * PAGE], "none twice, none missing"

        # An order that is given meanwhile moves nothing under the reader's eyes.
        await full.does("pause", {"mode": "drain"})
        await board.sees("One order has been given since.")
        await expect(rows).to_have_count(pages * PAGE)
        await page.locator("select[name=state]").select_option("failed")
        await page.get_by_label("Engine").fill("engine-29")
        of_one = [one for one in told if (one["engine"], one["state"]) == ("engine-29", "failed")]
        kind = of_one[0]["kind"]
        await page.locator("select[name=kind]").select_option(kind)
        await board.button("Search").click()
        failed = [one["id"] for one in of_one if one["kind"] == kind]
        assert 0 < len(failed) < PAGE
        await expect(rows).to_have_count(len(failed))
        assert await rows.evaluate_all(links) == failed
        await expect(board.button("Show more")).to_have_count(0)
        await page.go_back()
        await expect(rows).to_have_count(PAGE)
        assert await board.barriers() == []
        everything = list(csv.DictReader((await saved(board, "CSV")).splitlines(keepends=True)))
        assert len(everything) == MANY + 1
        assert board.refused == []


@pytest.mark.long
async def test_two_hundred_engines_can_be_looked_through(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    ready = tmp_path / "engines.json"
    command = (sys.executable, "-m", "tests.benchmarks.light_engines")
    arguments = [str(ready), str(ENGINES)]
    engines = Process("engines", arguments, tmp_path / "engines.log", Path.cwd(), command)
    engines.start()
    with cleaned(engines):
        addresses = engines.ready(ready)["admin_addresses"]
        async with stage(chromium, tmp_path, provider, observe_interval_s=60.0) as (board, _, at):
            for number, address in enumerate(addresses):
                name, labels = f"e-{number}", {"zone": f"z{number % 4}", "row": str(number // 20)}
                member = {"rank": 0, "admin": address, "control": address}
                body = {"id": name, "members": [member], "labels": labels}
                made = await at.gate.http.post("/v1/engines", json=body, headers=at.gate.auth())
                assert made.status_code == 201, made.text
                await at.gate.rooms.fleet.discover(name)
            await _looked_through(board)
            assert board.refused == []


async def _looked_through(board: Dashboard) -> None:
    page, loads = board.page, asked_for(board.page, r"/load\?")
    await board.go()
    rows = page.locator("tbody tr")
    await expect(rows).to_have_count(ENGINES + 1, timeout=30_000)
    serving = page.get_by_role("button", name=f"{ENGINES + 1} Serving")
    await expect(serving).to_be_visible()
    order = await page.locator("tbody .name").all_inner_texts()
    assert order[:3] == ["e-0", "e-1", "e-2"], "numbers as people count"
    assert order[10] == "e-10"

    # What is drawn stays while the engines are read again.
    await page.evaluate("document.querySelectorAll('tbody tr').forEach((row, n) => row.kept = n)")
    await page.wait_for_event("response", lambda one: "/v1/engines?" in one.url)
    kept = await rows.evaluate_all("rows => rows.map(row => row.kept)")
    assert kept == list(range(ENGINES + 1))
    # Of loads those alone are asked for that are in sight.
    assert 0 < len({url.split("?")[0] for url in loads}) < 60

    find = page.get_by_role("searchbox")
    await find.press_sequentially("z3 row=7")
    await expect(rows).to_have_count(5)
    await board.sees("5 engines shown")
    assert "q=z3" in page.url
    await page.get_by_label("Choose all 5 shown").check()
    await find.fill("")
    await page.get_by_role("combobox", name="Label").select_option("zone=z1")
    await expect(rows).to_have_count(ENGINES // 4)
    await page.get_by_label(f"Choose all {ENGINES // 4} shown").check()
    await board.sees(f"{ENGINES // 4 + 5} engines chosen")
    await page.get_by_label("Choose e-1", exact=True).uncheck()
    await board.sees(f"{ENGINES // 4 + 4} engines chosen")
    assert await board.barriers() == []
    await board.button("Choose none").click()
    await page.get_by_role("button", name="0 Paused").click()
    await board.sees("No engine fits these filters.")
    await board.button("Show all").click()
    await expect(rows).to_have_count(ENGINES + 1)

    before = {url.split("?")[0] for url in loads}
    await page.get_by_role("link", name="e-199", exact=True).scroll_into_view_if_needed()
    async with page.expect_request(lambda one: "/e-199/load" in one.url):
        pass
    assert f"{board.base}/v1/engines/e-199/load" not in before
    await page.get_by_label("Cards").check(force=True)
    await expect(page.locator(".card")).to_have_count(ENGINES + 1)
    await page.get_by_role("link", name="e-150", exact=True).click()
    await board.heading("e-150")
    await page.go_back()
    await expect(page.locator(".card")).to_have_count(ENGINES + 1)
