"""A client of the layer in front of an engine that is registered for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.http.gateway import ENGINE_ID, Gateway


@dataclass
class Calling:
    gate: Gateway
    http: httpx2.AsyncClient

    async def does(self, path: str, body: Any = None) -> Any:
        answer = await self.http.post(path, **({} if body is None else {"json": body}))
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.headers.get("content-type") else answer.text

    async def reads(self, path: str) -> Any:
        return (await self.http.get(path)).raise_for_status().json()


@asynccontextmanager
async def registered(
    gate: Gateway, layer: str, address: str, *, timeout_s: float = 60, **said: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """`said`: more of the registration."""
    member = {"rank": 0, "admin": address, "control": address}
    body = {"id": ENGINE_ID, "members": [member], **said}
    made = await gate.http.post("/v1/engines", json=body, headers=gate.auth())
    assert made.status_code == 201, made.text
    await gate.rooms.fleet.discover(ENGINE_ID)
    url = f"{gate.url}/compat/{layer}/{ENGINE_ID}/"
    async with httpx2.AsyncClient(base_url=url, headers=gate.auth(), timeout=timeout_s) as http:
        yield http
