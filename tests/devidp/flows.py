"""People and programs at the development issuer, in one process and on a clock to turn."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2

from app.devidp.authority import Authority
from app.devidp.clients import demo_clients
from app.devidp.codes import page_code
from app.devidp.issuer import DevIssuer
from app.devidp.people import demo_people
from app.devidp.server import create_app

SECRET = "a secret of this run"
ADMIN, INFERENCE, ENGINE = "urn:test:admin", "urn:test:inference", "urn:test:engine"
URL = "http://127.0.0.1:8766"
CALLBACK = "http://127.0.0.1:50123/auth/callback"
VERIFIER = "v" * 43
TTL_S = 3600


@dataclass
class Clock:
    at: datetime = field(default_factory=lambda: datetime(2026, 11, 2, 12, tzinfo=UTC))

    def __call__(self) -> datetime:
        return self.at

    def wait(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


@dataclass
class Issuing:
    http: httpx2.AsyncClient
    issuer: DevIssuer
    clock: Clock

    # ---- as a browser

    async def authorize(self, method: str = "GET", **query: str | None) -> httpx2.Response:
        """The authorization endpoint, asked by the dashboard unless the query says otherwise; a
        parameter that is None is left out. ``form_…`` is posted."""
        form = {k.removeprefix("form_"): v for k, v in query.items() if k.startswith("form_")}
        given: dict[str, str | None] = {
            "client_id": "dashboard",
            "response_type": "code",
            "redirect_uri": CALLBACK,
            "scope": "openid profile admin:read admin:pause",
            "code_challenge": challenge(VERIFIER),
            "code_challenge_method": "S256",
            "state": "s",
            "nonce": "n",
            **{k: v for k, v in query.items() if not k.startswith("form_")},
        }
        params = {name: value for name, value in given.items() if value is not None}
        return await self.http.request(method, "/authorize", params=params, data=form or None)

    async def pick(self, person: str, **query: str | None) -> httpx2.Response:
        """Picks a person on the page, as its form says to do."""
        page = await self.authorize("GET", **query)
        assert page.status_code == 200, page.text
        action = re.search(r'<form method="post" action="([^"]+)"', page.text)
        assert action is not None
        assert f'value="{person}"' in page.text
        form = {"code": page_code(SECRET), "person": person}
        headers = {"origin": URL}
        return await self.http.post(unescape(action.group(1)), data=form, headers=headers)

    async def code(self, person: str = "otto", **query: str | None) -> str:
        answer = await self.pick(person, **query)
        assert answer.status_code == 302, answer.text
        return landed(answer)["code"]

    # ---- as a program

    async def token(self, **form: str) -> httpx2.Response:
        """As the dashboard with its secret, or as the client that the form names."""
        if "client_id" in form:
            return await self.http.post("/token", data=form)
        return await self.http.post("/token", data=form, auth=("dashboard", SECRET))

    async def exchange(self, code: str, **form: str) -> httpx2.Response:
        given = {"code": code, "redirect_uri": CALLBACK, "code_verifier": VERIFIER, **form}
        return await self.token(grant_type="authorization_code", **given)

    async def logged_in(self, person: str = "otto", **query: str | None) -> dict[str, Any]:
        answer = await self.exchange(await self.code(person, **query))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def refresh(self, token: str, **form: str) -> httpx2.Response:
        return await self.token(grant_type="refresh_token", refresh_token=token, **form)


def issuing() -> Issuing:
    clock = Clock()
    issuer = DevIssuer(URL, now=clock)
    authority = Authority(
        issuer,
        demo_clients(admin_audience=ADMIN, inference_audience=INFERENCE, engine_audience=ENGINE),
        demo_people(),
        secret=SECRET,
        ttl_s=TTL_S,
        device_interval_s=5,
    )
    app = create_app(authority, secret=SECRET, hosts=["127.0.0.1:8766"])
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=URL)
    return Issuing(http, issuer, clock)


def challenge(verifier: str) -> str:
    digest = hashlib.sha256(verifier.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def landed(answer: httpx2.Response) -> dict[str, str]:
    """What a redirect brings to the client."""
    found = parse_qs(urlsplit(answer.headers["location"]).query)
    return {name: values[0] for name, values in found.items()}
