"""The gateway's browser sessions with people of the development issuer."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest

from app.devidp.codes import page_code
from tests.cli.people import ISSUER_SECRET
from tests.http.browsing import Browser
from tests.http.gateway import gateway
from tests.http.logging_in import key_file, secret_file

pytestmark = pytest.mark.anyio


async def test_a_person_is_picked_looks_around_and_logs_out(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    login = {
        "client_id": "dashboard",
        "client_secret_file": secret_file(secrets, "client", ISSUER_SECRET),
        "scopes": ("profile", "offline_access", "admin:read", "admin:pause"),
    }
    async with (
        gateway(
            tmp_path / "data",
            registered=False,
            trust={"login": login},
            browser_sessions={"key_files": (key_file(secrets),)},
        ) as gate,
        httpx2.AsyncClient(trust_env=False) as issuers,
    ):
        browser = Browser(gate, gate.url, issuers)
        back = await picked(issuers, await browser.begin(), "vera")
        assert back.startswith(f"{gate.url}/auth/callback?code=")
        assert (await browser.come_back(back)).status_code == 303
        session = await browser.session()
        assert (session["subject"], session["scopes"]) == ("vera", ["admin:read"])
        assert (await browser.call("GET", "/v1/engines")).status_code == 200
        ended = await browser.call("POST", "/auth/logout")
        assert ended.status_code == 200, ended.text
        there = await issuers.get(ended.json()["end_session_url"])
        assert there.headers["location"].startswith(f"{gate.url}/")
        assert (await browser.call("GET", "/v1/engines")).status_code == 401


async def picked(issuers: httpx2.AsyncClient, url: str, person: str) -> str:
    """Where the issuer sends the browser."""
    page = await issuers.get(url)
    action = re.search(r'<form method="post" action="([^"]+)"', page.text)
    assert action is not None, page.text
    form = {"code": page_code(ISSUER_SECRET), "person": person}
    answer = await issuers.post(urljoin(url, unescape(action.group(1))), data=form)
    return str(answer.headers["location"])
