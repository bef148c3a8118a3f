"""A page of the dashboard that is watched for all that must never happen on it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import BrowserContext, ConsoleMessage, Locator, Page, Request, expect

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
_LOADED = "Failed to load resource: "
"""A browser says so of every answer that is a refusal, whatever the page makes of it."""
_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
    window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


@dataclass
class Dashboard:
    """`faults`: what its console said, and what nobody caught. `refused`: answers that were."""

    page: Page
    base: str
    faults: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    @classmethod
    async def watched(cls, context: BrowserContext, base: str) -> Dashboard:
        page = await context.new_page()
        page.set_default_timeout(30_000)
        made = cls(page, base)
        await page.add_init_script(_VIOLATIONS)
        page.on("console", made._heard)
        page.on("pageerror", lambda error: made.faults.append(f"not caught: {error}"))
        page.on("request", made._asked)
        page.on("websocket", lambda socket: made.elsewhere.append(socket.url))
        return made

    async def go(self, path: str = "") -> None:
        await self.page.goto(f"{self.base}/ui/{path}")

    async def heading(self, text: str) -> None:
        await expect(self.page.locator("h1")).to_have_text(text, timeout=30_000)

    async def sees(self, text: str, among: str = "main") -> None:
        await expect(self.page.locator(among).get_by_text(text).first).to_be_visible(timeout=30_000)

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    async def barriers(self) -> list[str]:
        """What axe finds on the page as it stands, in both themes. The rules for WCAG 2.2 AA, and
        what axe holds for good practice."""
        found = []
        if not AXE.is_file():
            pytest.fail("axe-core is not installed; run: scripts/setup dev")
        if not await self.page.evaluate("'axe' in window"):
            await self.page.evaluate(AXE.read_text() + "; 0")
        # Of all rules one alone is about colours; the rest need not be tried twice.
        for theme, rules in (("light", "{}"), ("dark", "{runOnly: ['color-contrast']}")):
            await self.page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            result = await self.page.evaluate(f"axe.run({rules})")
            for one in result["violations"]:
                places = [node["target"] for node in one["nodes"]]
                found.append(f"{theme}: {one['id']} {one['help']} {json.dumps(places)}")
        await self.page.evaluate("delete document.documentElement.dataset.theme")
        return found

    async def faultless(self) -> None:
        """Nothing of what must never happen has happened."""
        violations = await self.page.evaluate("window.violations")
        found = [*self.faults, *violations, *self.elsewhere]
        assert not found, found

    def _heard(self, said: ConsoleMessage) -> None:
        if not said.location["url"].startswith(self.base) or said.type not in ("error", "warning"):
            return
        if said.text.startswith(_LOADED):
            self.refused.append(f"{said.text.removeprefix(_LOADED)} {said.location['url']}")
        else:
            self.faults.append(said.text)

    def _asked(self, request: Request) -> None:
        """Going to the provider is going elsewhere; what a page of ours asks for is not, and no
        frame of it goes anywhere."""
        own = urlsplit(self.base).netloc
        url = urlsplit(request.url)
        # What the page itself made, such as a file to be saved, has no host.
        if url.netloc == own or url.scheme in ("blob", "data"):
            return
        going = request.is_navigation_request()
        if going and request.frame.parent_frame is None:
            return
        page = self.page.url if going else request.frame.url
        if page.startswith(f"{self.base}/ui/"):
            self.elsewhere.append(request.url)


def asked_for(page: Page, pattern: str) -> list[str]:
    """Addresses that the page asks for from now on, of those that match; the list grows."""
    found: list[str] = []

    def note(request: Request) -> None:
        if re.search(pattern, request.url):
            found.append(request.url)

    page.on("request", note)
    return found


async def log_in_at_provider(page: Page, base: str, who: str = "nadia", at: str = "/ui/") -> None:
    """At the provider's own pages; from the dashboard's if it shows them, else by address."""
    await page.fill('input[name="login"]', who)
    await page.fill('input[name="password"]', "any")
    await page.click('button[type="submit"]')
    # The provider asks whether the gateway may have what it asks for.
    await page.click('button[type="submit"]')
    await page.wait_for_url(f"{base}{at}")


async def has(locator: Locator, **attributes: Any) -> None:
    for name, value in attributes.items():
        await expect(locator).to_have_attribute(name.replace("_", "-"), value)
