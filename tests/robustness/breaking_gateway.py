"""The whole gateway, with a crash point before and behind each thing that it does to the world.

Made by the same `create_app` as what `chadburn serve` serves, in a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, Engine, event

from app.backends.port import EngineBackend, Found, Order
from app.backends.registry import Backends
from app.domain.engine import Registration
from app.domain.operation import Operation
from app.domain.transitions import Advanced, Fact
from app.http.closing import Closing
from app.http.server import GatewayServer, bound
from app.ledger import Ledger
from app.ledger.values import Accepted, Lease
from app.main import Between, create_app
from app.observability.log import configure_logging
from app.operations.pace import Pace
from app.settings import load_settings
from tests.robustness import crash_points as points
from tests.robustness.crash_points import CrashPoints
from tests.robustness.history import Recorder
from tests.robustness.killed_processes import tell

# A successor on PostgreSQL waits for the lease of the one that was killed.
PACE = Pace(lease_ttl_s=2.0, sweep_s=0.2, retry_first_s=0.05, retry_most_s=0.5)
_UNDER_WAY = "crash_point"


class _Passing:
    """Everything else goes straight through."""

    def __init__(self, inner: Any, reach: CrashPoints) -> None:
        self._inner = inner
        self._points = reach

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Operations(_Passing):
    async def accept(self, operation: Operation, **more: Any) -> Accepted:
        accepted: Accepted = await self._inner.accept(operation, **more)
        if accepted.fresh:
            self._points.reach(points.ACCEPT_COMMITTED)
        return accepted

    async def record(self, before: Operation, advanced: Advanced, **more: Any) -> Operation:
        written: Operation = await self._inner.record(before, advanced, **more)
        if written.done:
            self._points.reach(points.END_COMMITTED)
        return written


class _Leases(_Passing):
    async def acquire(self, engine_id: str, owner: str, ttl_s: float) -> Lease | None:
        lease: Lease | None = await self._inner.acquire(engine_id, owner, ttl_s)
        if lease is not None:
            self._points.reach(points.LEASE_TAKEN)
        return lease


class _Ledger(_Passing):
    def __init__(self, inner: Ledger, reach: CrashPoints) -> None:
        super().__init__(inner, reach)
        self.operations = _Operations(inner.operations, reach)
        self.leases = _Leases(inner.leases, reach)


class _Backend(_Passing):
    async def carry_out(self, order: Order) -> AsyncIterator[Fact]:
        self._points.reach(points.BEFORE_CALL)
        async with aclosing(self._inner.carry_out(order)) as facts:
            async for fact in facts:
                self._points.reach(points.AFTER_CALL)
                yield fact

    async def find(self, operation_id: str, timeout_s: float) -> Found | None:
        found: Found | None = await self._inner.find(operation_id, timeout_s)
        self._points.reach(points.ENGINE_ASKED)
        return found


class _Backends(_Passing):
    def of(self, registration: Registration) -> EngineBackend:
        return cast("EngineBackend", _Backend(self._inner.of(registration), self._points))


def _watch_commits(reach: CrashPoints) -> None:
    """The points within a transaction: all is executed, and COMMIT has not been sent."""

    @event.listens_for(Engine, "before_cursor_execute")
    def see(
        connection: Connection,
        _cursor: Any,
        statement: str,
        parameters: Any,
        _context: Any,
        _many: bool,
    ) -> None:
        if statement.startswith("INSERT INTO operations"):
            connection.info[_UNDER_WAY] = points.ACCEPT_UNCOMMITTED
        elif statement.startswith("UPDATE operations") and "ended_at" in statement:
            values = parameters.values() if isinstance(parameters, dict) else parameters
            if {"succeeded", "failed", "cancelled"} & {v for v in values if isinstance(v, str)}:
                connection.info[_UNDER_WAY] = points.END_UNCOMMITTED

    @event.listens_for(Engine, "commit")
    def commit(connection: Connection) -> None:
        point = connection.info.pop(_UNDER_WAY, None)
        if point is not None:
            reach.reach(point)

    @event.listens_for(Engine, "rollback")
    def rollback(connection: Connection) -> None:
        connection.info.pop(_UNDER_WAY, None)


async def _serve(config: Path, port: int, ready: Path, reach: CrashPoints | None) -> None:
    settings = load_settings(config, port=port)
    configure_logging("INFO", "json")
    between = Between(pace=PACE)
    if reach is not None:
        crashing = reach
        _watch_commits(crashing)
        crashing.came()
        between = Between(
            ledger=lambda ledger: cast("Ledger", _Ledger(ledger, crashing)),
            backends=lambda backends: cast("Backends", _Backends(backends, crashing)),
            pace=PACE,
        )
    listener = bound(settings.host, port)
    at = settings.model_copy(update={"port": listener.getsockname()[1]})
    closing = Closing()

    server = GatewayServer(
        create_app(at, closing=closing, between=between),
        closing,
        grace_s=at.shutdown_grace_s,
        keep_alive_s=at.keep_alive_s,
        receive_timeout_s=at.receive_timeout_s,
        on_ready=lambda: tell(ready, {"base_url": at.base_url}),
    )
    await server.serve(sockets=[listener])


def main(config: Path, port: int, ready: Path, history: Path, folder: Path | None = None) -> None:
    """`folder`: of the crash points; None: there are none. `port` 0: a free one."""
    reach = None if folder is None else CrashPoints(folder, Recorder(history))
    asyncio.run(_serve(config, port, ready, reach))
