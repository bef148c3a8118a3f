"""The dashboard under a policy: what it leaves a person, on which engines, and what changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.browser.staging import stage
from tests.browser.watching import has
from tests.http.full import FULL, Full
from tests.http.test_policy import replace_policy
from tests.idp.oidc_provider.running import RealProvider

pytestmark = pytest.mark.anyio

READ = ["admin:read", "admin:audit"]
ORDERS = ["admin:pause", "admin:cache"]


def policy(
    provider: RealProvider, *, read: str | None = None, orders: str = "search"
) -> Callable[[str], str]:
    """People read the engines of the team `read` (None: all), and give orders to those of the team
    `orders`. Who has a token of the development issuer may do everything."""
    seen = '"all"' if read is None else f'{{ labels = {{ team = "{read}" }} }}'

    def text(issuer: str) -> str:
        return f"""
[[rules]]
name = "the tests' own"
who = {{ issuer = "{issuer}" }}
scopes = "as_granted"
engines = "all"
[[rules]]
name = "reading"
who = {{ issuer = "{provider.issuer}" }}
scopes = {READ}
engines = {seen}
[[rules]]
name = "orders"
who = {{ issuer = "{provider.issuer}" }}
scopes = {ORDERS}
engines = {{ labels = {{ team = "{orders}" }} }}
"""

    return text


async def labelled(full: Full, **labels: str) -> None:
    gate = full.gate
    found = (await gate.get(f"/v1/engines/{FULL}")).json()
    headers = {**gate.auth(), "If-Match": f'"g{found["generation"]}"'}
    changed = await gate.http.patch(f"/v1/engines/{FULL}", json={"labels": labels}, headers=headers)
    assert changed.status_code == 200, changed.text


@pytest.mark.long
async def test_an_engine_whose_label_denies_the_order(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    ruled = policy(provider)
    async with stage(chromium, tmp_path, provider, policy=ruled) as (board, full, at):
        page, dialog = board.page, board.page.locator("dialog")
        await labelled(full, team="ads")
        made = await at.gate.register("mine", labels={"team": "search"})
        assert made.status_code == 201, made.text
        await at.gate.rooms.fleet.discover("mine")
        await board.go("engines/full")
        why = (
            "Needs the scope admin:pause on full; the policy gives it to you only where team is "
            "search."
        )
        await has(board.button("Pause"), aria_disabled="true", title=why)
        await board.button("Pause").click(force=True)
        await expect(dialog).to_have_count(0)
        lacking = "Needs the scope admin:weights, which you do not have."
        await has(board.button("Update weights"), aria_disabled="true", title=lacking)
        assert await board.barriers() == []

        # Nor does an address help that somebody else has sent.
        await board.go("engines/full?order=pause")
        await board.sees(why, "dialog")
        await has(dialog.locator("button[type=submit]"), aria_disabled="true")

        # Among several it is left out, with the same reason.
        await board.go()
        await page.get_by_label("Choose all 2 shown").check()
        await board.button("Flush caches").click()
        left_out = dialog.locator("tr.left-out")
        await expect(left_out).to_have_count(1)
        await expect(left_out).to_contain_text(why.replace("admin:pause", "admin:cache"))
        await expect(dialog.get_by_role("button", name="Flush caches: 1 engine")).to_be_visible()
        await dialog.get_by_role("button", name="Close").last.click()

        # Labels are looked at as they are now.
        await board.go("engines/full")
        await has(board.button("Pause"), aria_disabled="true")
        await labelled(full, team="search")
        await expect(board.button("Pause")).not_to_have_attribute(
            "aria-disabled", "true", timeout=30_000
        )
        await board.button("Pause").click()
        await board.sees("Checked against revision", "dialog")
        await dialog.get_by_role("button", name="Pause", exact=True).click()
        await board.heading("Pause")
        await board.sees("Succeeded", ".head")
        assert board.refused == []


@pytest.mark.long
async def test_what_goes_out_of_sight_leaves_the_screen(
    chromium: Browser, tmp_path: Path, provider: RealProvider
) -> None:
    ruled = policy(provider)
    async with stage(chromium, tmp_path, provider, policy=ruled) as (board, full, at):
        gate, nothing = at.gate, "or none that you may see"
        await labelled(full, team="search")
        done = await full.does("flush-caches", {"caches": ["prefix"], "reason": "a secret"})
        await board.go(f"operations/{done['id']}")
        await board.sees("a secret")
        other = await type(board).watched(board.page.context, board.base)
        await other.go("engines/full")
        await other.sees("a secret", ".operations")

        replace_policy(gate, policy(provider, read="ads", orders="ads")(gate.issuer.issuer))
        for one in (board, other):
            await one.sees(nothing)
            await expect(one.page.get_by_text("a secret")).to_have_count(0)
            assert await one.barriers() == []
        replace_policy(gate, policy(provider, read="search")(gate.issuer.issuer))
        await other.go("engines/full")
        await other.sees("a secret", ".operations")

        # Whom no rule is for any more may do nothing at all.
        nobody = policy(provider)(gate.issuer.issuer).replace(
            f'"{provider.issuer}"', f'"{provider.issuer}", subject = "nobody"'
        )
        replace_policy(gate, nobody)
        await other.sees("Your token allows nothing here")
        await expect(other.page.get_by_text("a secret")).to_have_count(0)
        await other.faultless()
        await other.page.close()
