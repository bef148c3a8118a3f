"""A gateway at whose only issuer the test decides what is answered."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2

from app.auth.principal import Principal
from app.auth.sessions.clients import LoginAuth, LoginClient, LoginClients
from app.auth.sessions.house import LoginHouse, LoginSetup, open_house
from app.auth.sessions.kept import KeptTokens, SessionRules, Visitor
from app.auth.sessions.logins import Finished, LoginAnswer
from app.auth.tokens.issuers import IssuerConfig
from app.devidp.issuer import DevIssuer
from app.ledger import Ledger
from app.ledger.browser_sessions import StoredSession
from app.ledger.values import AuditFilter
from tests.auth.conftest import ADMIN, INFERENCE, Clock, Origin, Verifiers

CLIENT = "dash:board"
SECRET = "a secret: of % and ü"
OWN = "its own"


class Desk:
    """A gateway whose only issuer is the test's origin."""

    def __init__(
        self, origin: Origin, issuer: DevIssuer, house: LoginHouse, ledger: Ledger
    ) -> None:
        self.origin = origin
        self.issuer = issuer
        self.house = house
        self.ledger = ledger
        self.metadata: dict[str, Any] = {
            "issuer": origin.url,
            "authorization_endpoint": f"{origin.url}/authorize",
            "token_endpoint": f"{origin.url}/token",
            "jwks_uri": f"{origin.url}/jwks",
        }
        self.announce()

    def announce(self, **changes: Any) -> None:
        document = {k: v for k, v in {**self.metadata, **changes}.items() if v is not ...}
        self.origin.say("/.well-known/openid-configuration", json.dumps(document).encode())

    def tokens(self, nonce: str, **changes: Any) -> dict[str, Any]:
        """What the token endpoint answers; `id_…` changes a claim of the ID token."""
        now = int(self.issuer._now().timestamp())
        claims = {
            "iss": self.origin.url,
            "aud": CLIENT,
            "sub": "ada",
            "iat": now,
            "exp": now + 300,
            "nonce": nonce,
            **{k.removeprefix("id_claim_"): v for k, v in changes.items() if k.startswith("id_c")},
        }
        claims = {name: value for name, value in claims.items() if value is not ...}
        header = {"alg": self.issuer.algorithm, "kid": self.issuer.key.kid}
        answer = {
            "access_token": self.issuer.mint("ada", CLIENT, ["admin:read"], ADMIN, 300),
            "token_type": "Bearer",
            "expires_in": 300,
            "id_token": self.issuer.sign(claims, header),
            **{k: v for k, v in changes.items() if not k.startswith("id_c")},
        }
        return {name: value for name, value in answer.items() if value is not ...}

    async def session(self) -> str:
        """The Cookie header of a session that can be refreshed."""
        finished = await self.log_in(refresh_token="r1")
        return finished.cookies[0].partition(";")[0]

    async def stored(self, cookie: str) -> StoredSession:
        session = await self.house.desk.found([cookie])
        assert session is not None
        return session

    async def kept(self, cookie: str) -> KeptTokens:
        return self.house.desk._safe.take(await self.stored(cookie))

    async def who(self, cookie: str) -> Principal:
        return await self.house.desk.principal(await self.stored(cookie), Visitor(), in_use=True)

    async def ends(self) -> list[str | None]:
        """Why sessions have ended, the last one first."""
        rows = (await self.ledger.audit.page(AuditFilter(action="end_session"))).items
        return [row.entry.reason for row in rows]

    def answers(self, **changes: Any) -> dict[str, Any]:
        """From now on, to a refresh, which has no nonce."""
        tokens = self.tokens("", **{"id_claim_nonce": ..., **changes})
        self.origin.say("/token", json.dumps(tokens).encode())
        return tokens

    async def log_in(
        self,
        body: Any = None,
        *,
        iss: str | None = OWN,
        how: Any = None,
        **changes: Any,
    ) -> Finished:
        """With `body` for the token endpoint's answer, else tokens with these changes."""
        client = self.house.logins.client_for(None)
        assert client is not None
        begun = await self.house.logins.begin(client, None)
        asked = {k: v[0] for k, v in parse_qs(urlsplit(begun.location).query).items()}
        if body is None:
            body = json.dumps(self.tokens(asked["nonce"], **changes)).encode()
        self.origin.say("/token", body, **(how or {}))
        answer = LoginAnswer(
            state=asked["state"],
            code="code",
            issuer=self.origin.url if iss is OWN else iss,
            error=None,
            path_client=None,
        )
        return await self.house.logins.finish(answer, [begun.cookie.partition(";")[0]], Visitor())


@asynccontextmanager
async def answering(
    origin: Origin,
    issuer: DevIssuer,
    verifiers: Verifiers,
    http: httpx2.AsyncClient,
    clock: Clock,
    tmp_path: Path,
    ledger_url: str,
) -> AsyncIterator[Desk]:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    config = IssuerConfig(
        issuer=origin.url,
        audience=ADMIN,
        inference_audiences=(INFERENCE,),
        algorithms=(issuer.algorithm,),
    )
    client = LoginClient(
        config=config, name="it", client_id=CLIENT, auth=LoginAuth.BASIC, secret_file=secret
    )
    ledger = await Ledger.open(ledger_url, clock=clock)
    house = open_house(
        LoginSetup(
            clients=LoginClients([client]),
            keys=(secrets.token_bytes(32),),
            base_url="https://gw.test",
            rules=SessionRules(),
        ),
        ledger=ledger,
        judge=verifiers.make(config),
        http=http,
        clock=clock,
        random=secrets.token_bytes,
        monotonic=clock.monotonic,
    )
    try:
        yield Desk(origin, issuer, house, ledger)
    finally:
        await house.aclose(60)
        await ledger.close()
