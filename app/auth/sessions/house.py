"""All that belongs to logins and sessions, put together."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx2

from app.auth.sessions.clients import LoginClients
from app.auth.sessions.desk import SessionDesk
from app.auth.sessions.kept import Judge, Providers, SessionRules, TokenSafe
from app.auth.sessions.logins import Logins
from app.auth.sessions.places import BrowserPlace
from app.auth.sessions.provider import Provider, ProviderTimings
from app.auth.sessions.refreshing import Refreshes
from app.auth.sessions.sealing import SealingKeys
from app.clock import Clock
from app.ledger.ledger import Ledger

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginSetup:
    """`keys`: of 32 bytes each, the first encrypts. `base_url`: what browsers see of the
    gateway."""

    clients: LoginClients
    keys: tuple[bytes, ...] = field(repr=False)
    base_url: str
    rules: SessionRules


@dataclass(frozen=True, slots=True)
class LoginHouse:
    logins: Logins
    desk: SessionDesk
    refreshes: Refreshes
    providers: Providers

    async def aclose(self, within_s: float) -> None:
        """Let refreshes under way end, for so long at most; end all else."""
        await self.refreshes.aclose(within_s)
        for provider in self.providers.values():
            await provider.aclose()


def open_house(
    settings: LoginSetup,
    *,
    ledger: Ledger,
    judge: Judge,
    http: httpx2.AsyncClient,
    clock: Clock,
    random: Callable[[int], bytes],
    monotonic: Callable[[], float] = time.monotonic,
    timings: ProviderTimings | None = None,
) -> LoginHouse:
    """`http` and `ledger` stay the caller's to close, after this."""

    def new_secret() -> str:
        return base64.urlsafe_b64encode(random(SECRET_BYTES)).rstrip(b"=").decode()

    keys, place = SealingKeys(settings.keys, random), BrowserPlace(settings.base_url)
    safe = TokenSafe(keys)
    providers = {
        client.issuer: Provider(
            client,
            http=http,
            monotonic=monotonic,
            now=clock.now,
            redirect_uri=f"{settings.base_url}{client.callback}",
            timings=timings or ProviderTimings(),
        )
        for client in settings.clients
    }
    refreshes = Refreshes(
        ledger.browser_sessions,
        providers=providers,
        judge=judge,
        safe=safe,
        clock=clock,
        rules=settings.rules,
        new_secret=new_secret,
    )
    desk = SessionDesk(
        ledger.browser_sessions,
        providers=providers,
        judge=judge,
        safe=safe,
        refreshes=refreshes,
        place=place,
        clock=clock,
        rules=settings.rules,
        new_secret=new_secret,
    )
    logins = Logins(
        settings.clients,
        providers=providers,
        desk=desk,
        judge=judge,
        used=ledger.proofs,
        keys=keys,
        place=place,
        clock=clock,
        new_secret=new_secret,
    )
    return LoginHouse(logins, desk, refreshes, providers)
