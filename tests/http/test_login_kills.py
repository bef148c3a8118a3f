"""A gateway that is killed in the middle of a login, or while it refreshes a session: a process of
its own, and a certified provider."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx2
import pytest

from tests.http.browsing import PUBLIC, Browser, at_provider
from tests.http.gateway import Gateway
from tests.http.logging_in import BRIEF, SCOPES, key_file, register, secret_file
from tests.http.test_serving import environment
from tests.idp.oidc_provider.running import ADMIN, SECRET, RealProvider

pytestmark = [pytest.mark.anyio, pytest.mark.long]

SERVE = """
import os, signal, sys
from functools import partial
from pathlib import Path
import app.main as main
import app.startup as startup
from app.ledger.browser_sessions import BrowserSessions
from app.ledger.proofs import Proofs
from app.settings import load_settings

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def at(kind, name, before):
    real = getattr(kind, name)
    async def dies(self, *given, **named):
        if before:
            kill()
        await real(self, *given, **named)
        kill()
    setattr(kind, name, dies)

points = {
    "nowhere": lambda: None,
    # The issuer has given out new tokens, and they are nowhere but here.
    "refreshed": lambda: at(BrowserSessions, "refreshed", True),
    # The login counts as come back, and its code has not been shown to the issuer.
    "came_back": lambda: at(Proofs, "first_use", False),
    # The session is there, and its browser has not been told.
    "begun": lambda: at(BrowserSessions, "begin", False),
}
points[sys.argv[2]]()
# A gateway that was killed keeps others from refreshing for so long.
startup.SessionRules = partial(startup.SessionRules, refresh_lease_s=2.0)
sys.exit(main.serve(load_settings(Path(sys.argv[1]))))
"""


@dataclass
class There:
    """What a browser needs to know of a gateway."""

    port: int
    http: httpx2.AsyncClient


@dataclass
class Site:
    folder: Path
    provider: RealProvider
    browser: Browser

    @contextmanager
    def serving(self, point: str = "nowhere") -> Iterator[subprocess.Popen[str]]:
        """The browser finds it. A gateway that was not killed is asked to end."""
        started = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.folder / "chadburn.toml"), point],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        try:
            assert started.stdout is not None
            line = started.stdout.readline()
            assert line.startswith("chadburn: serving "), line
            yield started
        finally:
            if started.poll() is None:
                started.send_signal(signal.SIGTERM)
            started.communicate(timeout=60)

    def kept(self) -> list[tuple[str, str | None]]:
        """What the audit says of logins and sessions, in order."""
        with contextlib.closing(sqlite3.connect(self.folder / "data" / "chadburn.db")) as ledger:
            rows = ledger.execute("SELECT action, reason FROM audit ORDER BY id").fetchall()
        return [row for row in rows if row[0] in ("login", "end_session", "logout")]


@pytest.fixture
async def at(tmp_path: Path, provider: RealProvider) -> AsyncIterator[Site]:
    register(provider, BRIEF, PUBLIC, 9)
    secret = secret_file(tmp_path / "secrets", "client", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scopes = ", ".join(f'"{scope}"' for scope in (*SCOPES, "offline_access"))
    (tmp_path / "chadburn.toml").write_text(
        f'data_dir = "{tmp_path / "data"}"\nport = {port}\npublic_url = "{PUBLIC}"\n'
        f'[browser_sessions]\nkey_files = ["{key_file(tmp_path / "secrets")}"]\n'
        f'[[issuers]]\nissuer = "{provider.issuer}"\naudience = "{ADMIN}"\n[issuers.login]\n'
        f'client_id = "{BRIEF}"\nclient_secret_file = "{secret}"\nscopes = [{scopes}]\n'
        f'resource = "{ADMIN}"\nparameters = {{ prompt = "consent" }}\n'
    )
    # A connection for each request: others would be to a process that is gone.
    apart = httpx2.Limits(max_keepalive_connections=0)
    async with (
        httpx2.AsyncClient(timeout=30, limits=apart) as http,
        httpx2.AsyncClient(trust_env=False, timeout=30) as issuers,
    ):
        there = cast("Gateway", There(port, http))
        yield Site(tmp_path, provider, Browser(there, PUBLIC, issuers))


async def is_killed(ask: Awaitable[httpx2.Response]) -> None:
    with pytest.raises(httpx2.TransportError):
        await ask


async def reason_of(at: Site) -> str:
    """Why the browser's session is good for nothing, once somebody may say so."""
    async with asyncio.timeout(60):
        while True:
            answer = await at.browser.call("GET", "/v1/me")
            if answer.status_code != 503:
                assert answer.status_code == 401, answer.text
                return str(answer.json()["reason"])
            # For as long as the one that was killed might still have written.
            assert answer.json()["reason"] == "ISSUER_UNAVAILABLE"
            assert int(answer.headers["retry-after"]) > 0


async def logs_in_anew(at: Site) -> None:
    await at.browser.log_in("nadia")
    for _ in range(3):  # each of these refreshes
        answer = await at.browser.call("GET", "/v1/me")
        assert (answer.status_code, answer.json()["subject"]) == (200, "nadia")


async def test_killed_while_it_refreshes(at: Site) -> None:
    """The issuer has spent the old refresh token, and the new one is lost."""
    with at.serving("refreshed") as gateway:
        await at.browser.log_in("nadia", return_to="/problems")
        await is_killed(at.browser.call("GET", "/v1/me"))
        assert gateway.wait(30) == -signal.SIGKILL
    with at.serving():
        assert await reason_of(at) == "SESSION_ENDED"
        assert (await at.browser.session())["signed_in"] is False
        await logs_in_anew(at)
    assert at.kept() == [
        *(("login", None), ("end_session", "REFRESH_REFUSED"), ("login", None)),
    ]


@pytest.mark.parametrize("point", ["came_back", "begun"])
async def test_killed_between_the_callback_and_the_way_on(at: Site, point: str) -> None:
    with at.serving():
        await at.browser.log_in("nadia")
        before = dict(at.browser.cookies)
    with at.serving(point) as gateway:
        url = await at_provider(at.browser, await at.browser.begin(), "nadia")
        await is_killed(at.browser.come_back(url))
        assert gateway.wait(30) == -signal.SIGKILL
    with at.serving():
        # The person presses "reload".
        again = await at.browser.go(url)
        assert (again.status_code, again.json()["reason"]) == (400, "LOGIN_REPLAYED")
        assert "Begin anew" in again.json()["detail"]
        page = await at.browser.go(url, Accept="text/html")
        assert '<a href="/auth/login">' in page.text
        assert at.browser.cookies[at.browser.session_cookie] == before[at.browser.session_cookie]
        if point == "begun":  # and the session before ended with it
            assert await reason_of(at) == "SESSION_ENDED"
        else:
            assert (await at.browser.call("GET", "/v1/me")).status_code == 200
        await logs_in_anew(at)
    replaced = [("end_session", "SESSION_REPLACED"), ("login", None)]
    # The session of which nobody was told is over when nobody has used it for long enough.
    assert at.kept() == [
        ("login", None),
        *replaced,
        *([("login", None)] if point == "begun" else []),
    ]
