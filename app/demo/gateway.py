"""The demo's gateway: its settings, and the calls that make it ready."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import httpx2

from app.demo.folder import Folder
from app.demo.plan import ADMIN_AUDIENCE, CREDENTIAL, HOST, INFERENCE_AUDIENCE
from app.domain.scopes import Scope

ENGINE = "demo"
LABEL = "demo"
LOGIN_SCOPES = [*(scope for scope in Scope if scope is not Scope.WEIGHTS_UNSAFE), "offline_access"]
"""What the dashboard's client may ask for; a person grants what they have of it."""
POLL_S = 0.1


class GatewayRefused(Exception):
    """The gateway does not do what the demo needs of it; the message says what, in one line."""


def gateway_config(folder: Folder, port: int, issuer: str) -> str:
    """TOML. Strings are written as JSON, whose string syntax is a part of TOML's."""
    text = json.dumps
    return f"""\
# Written at each start of the demo.
data_dir = {text(str(folder.own("gateway").absolute()))}
host = {text(HOST)}
port = {port}
audience = {text(ADMIN_AUDIENCE)}
# The demo's operator has a token of client credentials, which shows no person.
clients_may_settle = true
observe_interval_s = 1.0
log_format = "console"

[[issuers]]
issuer = {text(issuer)}
inference_audiences = [{text(INFERENCE_AUDIENCE)}]
group_claims = ["groups"]

[issuers.login]
client_id = "dashboard"
client_secret_file = {text(str(folder.issuer_secret.absolute()))}
scopes = {text(LOGIN_SCOPES)}

[browser_sessions]
key_files = [{text(str(folder.session_key.absolute()))}]

# The endpoints of vLLM and of SGLang for the demo's engine, with the same tokens.
[[compat]]
layer = "vllm"
labels = {{ {LABEL} = "true" }}
flavour = "0.32"

[[compat]]
layer = "sglang"
labels = {{ {LABEL} = "true" }}

[profile_roots]
{ENGINE} = {text(str(folder.profiles.absolute()))}

[engine_credentials.{CREDENTIAL}]
bound_to = [{text(HOST)}]

[engine_credentials.{CREDENTIAL}.oauth]
token_url = {text(issuer + "/token")}
client_id = "engine"
client_secret_file = {text(str(folder.issuer_secret.absolute()))}
"""


class Gateway:
    """Calls as the demo's operator."""

    def __init__(self, base_url: str, token: str) -> None:
        self._client = httpx2.AsyncClient(
            base_url=base_url, headers={"authorization": f"Bearer {token}"}, timeout=10.0
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def register(self, address: str) -> str:
        """The engine's id. One that an earlier demo registered gets this address.

        Ids are not used again, so an engine that was removed comes back under another one.
        """
        members = [{"rank": 0, "admin": address, "control": address}]
        for number in itertools.count(1):
            engine = ENGINE if number == 1 else f"{ENGINE}-{number}"
            made = await self._client.post(
                "/v1/engines",
                json={
                    "id": engine,
                    "dialect": "openengine",
                    "members": members,
                    "tls": {"credential": CREDENTIAL},
                    "labels": {LABEL: "true"},
                },
            )
            if made.status_code == 201:
                return engine
            if made.status_code != 409:
                raise _refused("registering the engine", made)
            known = await self._client.get(f"/v1/engines/{engine}")
            if known.status_code == 404:
                continue
            if known.status_code != 200:
                raise _refused("reading the engine", known)
            if known.json()["members"] != members:
                await self._move(engine, known.json(), members)
            return engine
        raise AssertionError("the numbers never end")

    async def _move(self, engine: str, known: Any, members: list[Any]) -> None:
        changed = await self._client.patch(
            f"/v1/engines/{engine}",
            json={"members": members},
            headers={"if-match": f'"g{known["generation"]}"'},
        )
        if changed.status_code != 200:
            raise _refused("giving the engine its new address", changed)

    async def serving(self, engine: str, *, since: datetime, check: Callable[[], None]) -> None:
        """Until the gateway has seen the engine serve; what it saw before `since` is old."""
        while True:
            check()
            answer = await self._client.get(f"/v1/engines/{engine}")
            if answer.status_code != 200:
                raise _refused("reading the engine", answer)
            health = answer.json()["health"]
            seen = health.get("observed_at")
            if health["state"] == "serving" and seen and datetime.fromisoformat(seen) >= since:
                return
            await asyncio.sleep(POLL_S)


def _refused(what: str, answer: httpx2.Response) -> GatewayRefused:
    try:
        found = answer.json()
        why = f"{found.get('title')}: {found.get('detail')} ({found.get('reason')})"
    except ValueError:
        why = "without saying why"
    return GatewayRefused(f"{what} was answered with {answer.status_code}: {why}")
