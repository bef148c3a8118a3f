"""Logins and sessions in one process: the development issuer, a ledger, and a clock to turn."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2

from app.auth.principal import Principal
from app.auth.sessions.clients import LoginAuth, LoginClient, LoginClients
from app.auth.sessions.house import LoginHouse, LoginSetup, open_house
from app.auth.sessions.kept import SessionRules, Visitor
from app.auth.sessions.logins import LoginAnswer
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.verifier import TokenVerifier
from app.devidp.codes import page_code
from app.ledger import Ledger
from app.ledger.browser_sessions import StoredSession
from app.ledger.values import AuditFilter
from tests.devidp.flows import ADMIN, INFERENCE, SECRET, URL, Clock, Issuing, issuing

BASE = "http://127.0.0.1:50123"
KEY = bytes(range(32))


@dataclass(frozen=True)
class Turned:
    """The issuer's clock, as the gateway reads it."""

    clock: Clock

    def now(self) -> datetime:
        return self.clock()


@dataclass
class Wire:
    """What stands between the gateway and its issuer."""

    calls: Counter[str] = field(default_factory=Counter)
    down: bool = False
    gate: asyncio.Event | None = None
    """Where set, what goes to the token endpoint waits for it."""
    lose_answers: bool = False
    """The issuer hears, and nobody hears the issuer."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def asked(self, path: str, times: int) -> None:
        """Returns when it has been asked so often."""
        async with asyncio.timeout(60):
            while self.calls[path] < times:
                self.changed.clear()
                await self.changed.wait()

    def before(self) -> Callable[[httpx2.Request], Any]:
        async def note(request: httpx2.Request) -> None:
            self.calls[request.url.path] += 1
            self.changed.set()
            if self.gate is not None and request.url.path == "/token":
                await self.gate.wait()
            if self.down:
                raise httpx2.ConnectError("down", request=request)

        return note

    def after(self) -> Callable[[httpx2.Response], Any]:
        async def lose(response: httpx2.Response) -> None:
            if self.lose_answers:
                raise httpx2.ReadError("lost", request=response.request)

        return lose


class Housed:
    def __init__(self, issuer: Issuing, ledger: Ledger, folder: Path) -> None:
        self.issuer = issuer
        self.ledger = ledger
        self.wire = Wire()
        self.clock = issuer.clock
        issuer.http.event_hooks = {
            "request": [self.wire.before()],
            "response": [self.wire.after()],
        }
        self._secret = folder / "client"
        self._secret.write_text(SECRET)
        self._verifiers: list[TokenVerifier] = []

    def open(
        self,
        *,
        keys: tuple[bytes, ...] = (KEY,),
        rules: dict[str, Any] | None = None,
        ledger: Ledger | None = None,
        **how: Any,
    ) -> LoginHouse:
        """A gateway's part of it; several share the ledger, unless one has `ledger` for its own way
        to the same database. `how`: of the client."""
        config = IssuerConfig(issuer=URL, audience=ADMIN, inference_audiences=(INFERENCE,))
        verifier = TokenVerifier(
            [config],
            http=self.issuer.http,
            now=self.clock,
            monotonic=lambda: self.clock().timestamp(),
        )
        self._verifiers.append(verifier)
        client = LoginClient(
            **{
                "config": config,
                "name": "dev",
                "client_id": "dashboard",
                "auth": LoginAuth.BASIC,
                "secret_file": self._secret,
                "scopes": ("admin:read", "offline_access"),
                **how,
            }
        )
        return open_house(
            LoginSetup(
                clients=LoginClients([client]),
                keys=keys,
                base_url=BASE,
                rules=SessionRules(**{"look_s": 0.01, "refresh_wait_s": 5.0, **(rules or {})}),
            ),
            ledger=ledger or self.ledger,
            judge=verifier,
            http=self.issuer.http,
            clock=Turned(self.clock),
            random=secrets.token_bytes,
            monotonic=lambda: self.clock().timestamp(),
        )

    async def came_back(self, house: LoginHouse, person: str = "otto") -> tuple[LoginAnswer, str]:
        """From the issuer, with the cookie of the login."""
        client = house.logins.client_for(URL)
        assert client is not None
        begun = await house.logins.begin(client, None)
        page = await self.issuer.http.get(begun.location)
        action = re.search(r'<form method="post" action="([^"]+)"', page.text)
        assert action is not None, page.text
        answer = await self.issuer.http.post(
            unescape(action.group(1)),
            data={"code": page_code(SECRET), "person": person},
            headers={"origin": URL},
        )
        query = parse_qs(urlsplit(answer.headers["location"]).query)
        given = {name: values[0] for name, values in query.items()}
        return (
            LoginAnswer(
                state=given["state"],
                code=given["code"],
                issuer=given["iss"],
                error=None,
                path_client=None,
            ),
            begun.cookie.partition(";")[0],
        )

    async def log_in(self, house: LoginHouse, person: str = "otto") -> str:
        """The Cookie header of a session."""
        answer, cookie = await self.came_back(house, person)
        finished = await house.logins.finish(answer, [cookie], Visitor())
        return finished.cookies[0].partition(";")[0]

    async def who(self, house: LoginHouse, cookie: str, *, in_use: bool = True) -> Principal:
        session = await house.desk.found([cookie])
        assert session is not None
        return await house.desk.principal(session, Visitor(), in_use=in_use)

    async def reseal(self, session: StoredSession, sealed: bytes) -> None:
        """Have other tokens in its row."""
        store = self.ledger.browser_sessions
        assert await store.claim_refresh(session.digest, session.version, "test", session.ends_at)
        ends_at = session.access_ends_at
        assert await store.refreshed(
            session.digest, session.version, "test", sealed=sealed, access_ends_at=ends_at
        )

    async def audited(self) -> list[tuple[str, str | None]]:
        """Oldest first."""
        rows = (await self.ledger.audit.page(AuditFilter())).items
        return [(row.entry.action, row.entry.reason) for row in reversed(rows)]

    async def aclose(self) -> None:
        for verifier in self._verifiers:
            await verifier.aclose()
        await self.issuer.http.aclose()


@asynccontextmanager
async def housed(folder: Path, url: str) -> AsyncIterator[Housed]:
    """`url`: of a ledger that has its schema."""
    issuer = issuing()
    ledger = await Ledger.open(url, clock=Turned(issuer.clock))
    made = Housed(issuer, ledger, folder)
    try:
        yield made
    finally:
        await made.aclose()
        await ledger.close()
