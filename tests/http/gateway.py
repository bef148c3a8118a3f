"""A whole gateway on a real socket: real ledger, real issuer, a scripted engine over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import httpx2
from fastapi import FastAPI

from app.devidp.issuer import DevIssuer
from app.devidp.running import DevIssuerSettings, running
from app.domain.commands import StartProfile
from app.domain.kinds import OperationKind, OperationState, ProfilerKind
from app.domain.operation import Actor, Operation
from app.domain.scopes import Scope
from app.domain.transitions import Advanced, Cancelled, Completed, Dispatched, Fact, advance
from app.http.closing import Closing
from app.http.listening import Listening, listening
from app.http.rooms import Rooms
from app.http.server import GatewayServer, bound
from app.ledger.values import AuditEntry
from app.main import create_app
from app.settings import IssuerSettings, Settings
from app.startup import identities_of
from tests.doubles.empty_ledger import place_empty_ledger
from tests.http.scripted_engine import ScriptedEngine, scripted_engine

ADMIN = "urn:test:admin"
INFERENCE = "urn:test:inference"
ENGINE_ID = "e1"
EVERYTHING = tuple(Scope)


@dataclass
class Gateway:
    url: str
    port: int
    issuer: DevIssuer
    engine: ScriptedEngine
    app: FastAPI
    server: GatewayServer
    http: httpx2.AsyncClient
    besides: Listening
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def rooms(self) -> Rooms:
        return cast("Rooms", self.server.lifespan.state["rooms"])

    def token(
        self,
        *scopes: str,
        audience: str = ADMIN,
        subject: str = "ada",
        ttl_s: int = 600,
        **overrides: Any,
    ) -> str:
        return self.issuer.mint(subject, "console", scopes, audience, ttl_s, **overrides)

    def auth(self, *scopes: str, **how: Any) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token(*(scopes or EVERYTHING), **how)}"}

    def key(self) -> dict[str, str]:
        return {"Idempotency-Key": f"key-{next(self._numbers)}"}

    async def order(
        self,
        verb: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        engine: str = ENGINE_ID,
    ) -> httpx2.Response:
        """Given by someone who may do everything, under a new key unless `headers` has one."""
        sent = {**self.auth(), **self.key(), **(headers or {})}
        return await self.http.post(f"/v1/engines/{engine}/{verb}", json=body, headers=sent)

    async def flush(self, **headers: str) -> dict[str, Any]:
        """A flush that has ended."""
        answer = await self.order("flush-caches", {"caches": ["prefix"]}, {"Prefer": "wait=20"})
        assert answer.status_code == 200, answer.text
        return cast("dict[str, Any]", answer.json())

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self.http.get(path, headers={**self.auth(), **headers})

    async def ended_profile(self, result: Mapping[str, Any] | None = None) -> str:
        """The id of a profile of `e1` that stands in the ledger; without `result` a cancelled one.
        The scripted engine records none."""
        rooms, now = self.rooms, self.rooms.clock.now()
        operation = Operation(
            id=rooms.new_id(),
            engine_id=ENGINE_ID,
            kind=OperationKind.PROFILE,
            state=OperationState.ACCEPTED,
            request=StartProfile(profiler=ProfilerKind.TORCH).document(),
            actor=Actor(self.issuer.issuer, "ada", "console"),
            created_at=now,
            deadline_at=now + timedelta(hours=1),
        )
        entry = AuditEntry(at=now, action="profile", outcome="accepted")
        await rooms.ledger.operations.accept(operation, key=None, audit=entry)
        facts: list[Fact] = [Cancelled(message="")]
        if result is not None:
            facts = [Dispatched(), Completed(result=result)]
        for fact in facts:
            step = advance(operation, fact, now)
            assert isinstance(step, Advanced)
            operation = await rooms.ledger.operations.record(operation, step)
        return operation.id

    async def register(
        self, engine_id: str = ENGINE_ID, headers: Mapping[str, str] | None = None, **more: Any
    ) -> httpx2.Response:
        member = {"rank": 0, "admin": self.engine.address, "control": self.engine.address}
        body = {"id": engine_id, "members": [member], "allow_shared_address": True, **more}
        return await self.http.post("/v1/engines", json=body, headers=headers or self.auth())


@asynccontextmanager
async def gateway(
    data_dir: Path,
    *,
    registered: bool = True,
    trust: Mapping[str, Any] = MappingProxyType({}),
    policy: Callable[[str], str] | None = None,
    others: Sequence[IssuerSettings] = (),
    **changes: Any,
) -> AsyncIterator[Gateway]:
    """`trust`: settings of its issuer; `changes`: of the gateway. `policy`: the text of a policy
    file for tokens of that issuer, whose `groups` then count. `others`: further issuers."""
    issuing = DevIssuerSettings(
        secret="s" * 40,
        admin_audience=ADMIN,
        inference_audience=INFERENCE,
        engine_audience="urn:test:engine",
    )
    async with (
        AsyncExitStack() as held,
        running(issuing) as issuer,
        scripted_engine() as engine,
    ):
        if policy is not None:
            path = data_dir.with_suffix(".policy.toml")
            path.write_text(policy(issuer.issuer))
            trust = {"group_claims": ("groups",), **trust}
            changes = {"policy_file": path, **changes}
        listener = bound("127.0.0.1", 0)
        settings = Settings(
            **{
                "data_dir": data_dir,
                "port": listener.getsockname()[1],
                "audience": ADMIN,
                "issuers": (issuer_settings(issuer, **trust), *others),
                "shutdown_grace_s": 5.0,
                "observe_interval_s": 600.0,
                "max_refusals_per_minute": 0,  # whole matrices of bad tokens come from one address
                **changes,
            }
        )
        if settings.database_url is None:
            await place_empty_ledger(data_dir / "chadburn.db")
        held.callback(listener.close)
        besides = held.enter_context(listening(identities_of(settings)))
        closing = Closing()
        app = create_app(settings, closing=closing)
        ready = asyncio.Event()
        server = GatewayServer(
            app,
            closing,
            grace_s=5.0,
            keep_alive_s=30,
            receive_timeout_s=settings.receive_timeout_s,
            send_timeout_s=settings.stream_send_timeout_s,
            max_connections=settings.max_connections,
            on_ready=ready.set,
            tls=besides.tls_listeners(),
        )
        serving = asyncio.create_task(_serve(server, [listener, *besides.sockets]))
        starting = asyncio.create_task(ready.wait())
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            starting.cancel()
            listener.close()
            await serving
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(
            base_url=settings.base_url,
            timeout=30,
            limits=limits,
            verify=False,  # plain HTTP: reading the roots would take as long as a test
        ) as http:
            made = Gateway(
                settings.base_url, settings.port, issuer, engine, app, server, http, besides
            )
            try:
                if registered:
                    answer = await made.register()
                    assert answer.status_code == 201, answer.text
                    await made.rooms.fleet.discover(ENGINE_ID)
                yield made
            finally:
                server.should_exit = True
                with contextlib.suppress(asyncio.CancelledError):
                    await serving


def issuer_settings(issuer: DevIssuer, **changes: Any) -> IssuerSettings:
    return IssuerSettings(
        **{
            "issuer": issuer.issuer,
            "inference_audiences": (INFERENCE,),
            "algorithms": (issuer.algorithm,),
            **changes,
        }
    )


async def _serve(server: GatewayServer, listeners: list[Any]) -> None:
    # Without uvicorn's signal handlers, which belong to a whole process.
    await server._serve(sockets=listeners)
