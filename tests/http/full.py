"""An engine of two ranks that offers every order, registered beside the scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2

from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.full_engine import FullEngine
from tests.http.gateway import Gateway

FULL = "full"


@dataclass
class Full:
    gate: Gateway
    double: EngineDouble

    @property
    def engine(self) -> FullEngine:
        return cast("FullEngine", self.double.engine)

    async def order(self, verb: str, body: Mapping[str, Any], **headers: str) -> httpx2.Response:
        return await self.gate.order(verb, body, headers, engine=FULL)

    async def does(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The operation once it has ended, however that was."""
        answer = await self.order(verb, body, Prefer="wait=20")
        assert answer.status_code == 200, answer.text
        return cast("dict[str, Any]", answer.json())

    async def effect(self, verb: str, body: Mapping[str, Any]) -> str:
        """What a dry run says that it would do."""
        plan = await self.order(verb, {**body, "dry_run": True})
        assert plan.status_code == 200, plan.text
        return str(plan.json()["effect"])

    async def facts(self) -> dict[str, Any]:
        found = await self.gate.get(f"/v1/engines/{FULL}")
        return cast("dict[str, Any]", found.json()["facts"])


@asynccontextmanager
async def full_engine(
    gate: Gateway, data_dir: Path, engine: type[FullEngine] = FullEngine
) -> AsyncIterator[Full]:
    async with running_engine(data_dir, make_engine=lambda: engine(world_size=2)) as double:
        address = double.admin_address
        body = {"id": FULL, "members": [{"rank": 0, "admin": address, "control": address}]}
        made = await gate.http.post("/v1/engines", json=body, headers=gate.auth())
        assert made.status_code == 201, made.text
        await gate.rooms.fleet.discover(FULL)
        yield Full(gate, double)
