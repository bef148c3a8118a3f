"""What most tests of the dashboard begin with: an engine, and a person who looks at the fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser

from app.domain.scopes import Scope
from tests.browser.watching import Dashboard, log_in_at_provider
from tests.http.full import Full, full_engine
from tests.http.logging_in import Site, site
from tests.idp.oidc_provider.running import RealProvider

ALL = tuple(scope for scope in Scope if scope is not Scope.WEIGHTS_UNSAFE)


@asynccontextmanager
async def stage(
    chromium: Browser, folder: Path, provider: RealProvider, *scopes: str, **changes: Any
) -> AsyncIterator[tuple[Dashboard, Full, Site]]:
    """An engine of two ranks that offers every order, and a person at the fleet. `changes`: of the
    gateway's settings, and what else `site` takes."""
    wanted = {"scopes": scopes or ALL}
    given = {"observe_interval_s": 0.5, "login": wanted, **changes}
    async with (
        site(folder, provider, base=None, **given) as at,
        full_engine(at.gate, folder / "full") as full,
    ):
        context = await chromium.new_context(viewport={"width": 1280, "height": 900})
        board = await Dashboard.watched(context, at.base)
        await board.go()
        await board.heading("Chadburn")
        await board.page.get_by_role("link", name="Log in").click()
        await log_in_at_provider(board.page, at.base)
        await board.heading("Fleet")
        yield board, full, at
        await board.faultless()
        await context.close()
