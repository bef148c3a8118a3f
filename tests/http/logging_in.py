"""A gateway at which people log in, at a certified provider beside the development issuer."""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from app.auth.sessions.kept import KeptTokens
from app.settings import IssuerSettings
from tests.http.browsing import PUBLIC, Browser
from tests.http.gateway import Gateway, gateway
from tests.idp.oidc_provider.running import ADMIN, SECRET, RealProvider

READER, RENEWED, BRIEF = "dashboard", "dashboard-renewed", "brief-dashboard"
"""Clients at the provider: without refresh tokens, with some, and with access tokens that are so
short that every request refreshes them."""
SCOPES = ("admin:read", "admin:pause", "admin:cache", "admin:audit")


class Site:
    """A gateway, what people log in with, and browsers."""

    def __init__(self, gate: Gateway, provider: RealProvider, base: str) -> None:
        self.gate = gate
        self.provider = provider
        self.base = base
        self._issuers: list[httpx2.AsyncClient] = []

    def browser(self) -> Browser:
        issuers = httpx2.AsyncClient(trust_env=False, timeout=30, verify=False)
        self._issuers.append(issuers)
        return Browser(self.gate, self.base, issuers)

    async def tokens_of(self, browser: Browser) -> KeptTokens:
        """What the gateway keeps for it: nobody else could read them."""
        desk = self.gate.rooms.browser_sessions
        assert desk is not None
        session = await desk.found([f"{browser.session_cookie}={browser.session_id}"])
        assert session is not None
        return desk._safe.take(session)

    async def audited(self, action: str) -> list[dict[str, Any]]:
        """Newest first."""
        found = await self.gate.get(f"/v1/audit?action={action}")
        assert found.status_code == 200, found.text
        return list(found.json()["items"])

    async def aclose(self) -> None:
        for issuers in self._issuers:
            await issuers.aclose()


def secret_file(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def key_file(folder: Path, name: str = "session.key") -> Path:
    return secret_file(folder, name, base64.b64encode(secrets.token_bytes(32)).decode())


def register(provider: RealProvider, client_id: str, base: str, port: int, **more: Any) -> None:
    native = base.startswith("http:")
    own = f"http://127.0.0.1:{port}/auth/backchannel-logout"
    given = {
        "client_id": client_id,
        "client_secret": SECRET,
        "grant_types": ["authorization_code", "refresh_token"],
        "response_types": ["code"],
        "redirect_uris": [f"{base}/auth/callback", f"{base}/auth/callback/provider"],
        "post_logout_redirect_uris": [f"{base}/"],
        "backchannel_logout_uri": own,
        "backchannel_logout_session_required": True,
        "application_type": "native" if native else "web",
        **more,
    }
    provider.register(**{name: value for name, value in given.items() if value is not None})


@asynccontextmanager
async def site(
    tmp_path: Path,
    provider: RealProvider,
    *,
    base: str | None = PUBLIC,
    client_id: str = READER,
    login: dict[str, Any] | None = None,
    issuer: dict[str, Any] | None = None,
    registration: dict[str, Any] | None = None,
    sessions: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[Site]:
    """`base` None: the gateway's own address on loopback. `login`, `issuer`, `registration`,
    `sessions`: what is different there."""
    renewed = client_id != READER
    given = {
        "client_id": client_id,
        "name": "provider",
        "client_secret_file": secret_file(tmp_path / "secrets", "client", SECRET),
        "scopes": (*SCOPES, "offline_access") if renewed else SCOPES,
        "resource": ADMIN,
        "parameters": {"prompt": "consent"} if renewed else {},
        **(login or {}),
    }
    trusted = IssuerSettings(
        **{"issuer": provider.issuer, "audience": ADMIN, "login": given, **(issuer or {})}
    )
    keys = (key_file(tmp_path / "secrets"),)
    settings: dict[str, Any] = {
        "others": (trusted,),
        "browser_sessions": {"key_files": keys, **(sessions or {})},
        **({} if base is None else {"public_url": base}),
        **changes,
    }
    async with gateway(tmp_path / "data", registered=False, **settings) as gate:
        # Its own address, which is not what browsers see.
        gate.http.base_url = f"http://127.0.0.1:{gate.port}"
        register(provider, given["client_id"], base or gate.url, gate.port, **(registration or {}))
        made = Site(gate, provider, base or gate.url)
        try:
            yield made
        finally:
            await made.aclose()


@asynccontextmanager
async def two_issuers(folder: Path, provider: RealProvider) -> AsyncIterator[Site]:
    """People may log in at the development issuer, `dev`, too."""
    secret = secret_file(folder / "secrets", "dev", "s" * 40)
    login = {"client_id": "dashboard", "name": "dev", "client_secret_file": secret}
    async with site(folder, provider, trust={"login": login}) as made:
        yield made
