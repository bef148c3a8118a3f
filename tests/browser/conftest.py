"""A real Chromium, and a gateway at which people of a certified provider log in."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, async_playwright

from tests.browser.elsewhere import Elsewhere, elsewhere
from tests.http.logging_in import Site, site
from tests.idp.oidc_provider.running import RealProvider, real_provider

_LONG_MS = 30_000


@pytest.fixture(scope="session")
def provider() -> Iterator[RealProvider]:
    with real_provider() as running:
        yield running


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    """Debian's own: what Playwright would fetch is another build than people have."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("Chromium is not installed; run as root: scripts/need chromium")
    async with async_playwright() as playwright:
        # The sandbox refuses to run as root, which build machines are.
        yield await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
async def page(chromium: Browser) -> Page:
    made = await (await chromium.new_context()).new_page()
    made.set_default_timeout(_LONG_MS)
    return made


@pytest.fixture
async def at(tmp_path: Path, provider: RealProvider) -> AsyncIterator[Site]:
    async with site(tmp_path, provider, base=None) as made:
        yield made


@pytest.fixture
def other_origins() -> Iterator[Elsewhere]:
    with elsewhere() as server:
        yield server
