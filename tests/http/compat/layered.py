"""A gateway with the endpoint layer switched on, and an engine that has something behind every
endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from app.domain.kinds import CacheKind, ReconfigurableField
from app.domain.weight_sessions import Chunk
from app.enginekit.runtime import Order
from tests.enginekit.session_engine import COMPLETE, SessionEngine
from tests.http.full import FULL, Full, full_engine
from tests.http.gateway import Gateway, gateway


class LayeredEngine(SessionEngine):
    """A piece with a whole checkpoint is all that an update needs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(models=("tiny",), **options)
        self.offered = replace(
            self.offered,
            cache_kinds=frozenset(CacheKind),
            reconfigurable=self.offered.reconfigurable | {ReconfigurableField.DATA_PARALLEL_SIZE},
        )

    async def stage_chunk(self, order: Order, rank: int, chunk: Chunk) -> None:
        await super().stage_chunk(order, rank, chunk)
        self.files[order.operation_id, rank].add(COMPLETE)


class OneRank(LayeredEngine):
    """As the engines are that requests were recorded of."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "world_size": 1})


@dataclass
class Layered:
    """`person`: whose token is shown unless a call says otherwise."""

    gate: Gateway
    full: Full
    layer: str = "vllm"
    person: str = "ada"
    engine_id: str = FULL

    @property
    def engine(self) -> LayeredEngine:
        assert isinstance(self.full.engine, LayeredEngine)
        return self.full.engine

    @property
    def url(self) -> str:
        return f"{self.gate.url}/compat/{self.layer}/{self.engine_id}"

    async def call(
        self, method: str, path: str, *, subject: str | None = None, **how: Any
    ) -> httpx2.Response:
        headers = {**self.gate.auth(subject=subject or self.person), **how.pop("headers", {})}
        url = f"/compat/{self.layer}/{self.engine_id}{path}"
        return await self.gate.http.request(method, url, headers=headers, **how)

    async def post(self, path: str, body: Any = None, **how: Any) -> httpx2.Response:
        sent = {} if body is None else {"json": body}
        return await self.call("POST", path, **sent, **how)

    async def does(self, path: str, body: Any = None, **how: Any) -> Any:
        answer = await self.post(path, body, **how)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    async def reads(self, path: str) -> Any:
        answer = await self.call("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    async def operations(self) -> list[dict[str, Any]]:
        """The oldest first."""
        listed = await self.gate.get(f"/v1/operations?engine={self.engine_id}&page_size=200")
        return list(reversed(listed.json()["items"]))

    async def kinds(self) -> list[str]:
        return [operation["kind"] for operation in await self.operations()]


@asynccontextmanager
async def layered(
    folder: Path,
    *,
    layer: str = "vllm",
    flavour: str | None = None,
    engine: type[LayeredEngine] = LayeredEngine,
    **more: Any,
) -> AsyncIterator[Layered]:
    compat: dict[str, Any] = {"layer": layer, "engines": (FULL,)}
    if flavour is not None:
        compat["flavour"] = flavour
    async with (
        gateway(folder / "data", compat=(compat,), **more) as gate,
        full_engine(gate, folder / "full", engine) as full,
    ):
        yield Layered(gate, full, layer)
