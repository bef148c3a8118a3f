"""An engine in this process, on real gRPC and free ports, that counts and misbehaves on demand.

    async with running_engine(tmp_path) as double:
        double.admin_address, double.inference_address
        double.rpcs["Pause"], double.orders        # what arrived, what reached the ranks
        double.fail_next("Pause", Fault.DROP_AFTER_ACCEPTANCE)
        await double.restart()                     # a new process life on the same store and ports

It is the kit itself over `MinimalEngine` (`double.engine`), so it refuses, replays and remembers as
any engine does. The idempotency fingerprint covers the whole request, `deadline_ms` included.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.enginekit.server import EngineServer, KitSettings
from tests.enginekit.minimal_engine import Call, MinimalEngine


class Fault(Enum):
    """What happens to one call of a method."""

    REFUSE_CONNECTION = "refuse_connection"  # UNAVAILABLE; the engine never saw it
    DROP_AFTER_ACCEPTANCE = "drop_after_acceptance"  # UNAVAILABLE after the first event
    LOSE_REPLY = "lose_reply"  # carried out, and UNAVAILABLE instead of the first reply
    HANG = "hang"  # carried out, and never answered
    UNAUTHENTICATED = "unauthenticated"  # the engine does not take our credential


class EngineDouble:
    """`settings` are fields of KitSettings. `rpcs` counts by method name over all lives;
    `received` has (method, idempotency key) in order of arrival, before any judging."""

    def __init__(
        self,
        data_dir: Path,
        *,
        make_engine: Callable[[], MinimalEngine] = MinimalEngine,
        now: Callable[[], Any] | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        **settings: Any,
    ) -> None:
        self._make_engine = make_engine
        self._interceptors = tuple(interceptors)
        self._clock: dict[str, Any] = {} if now is None else {"now": now}
        self._settings = {"insecure_loopback": True, "observe_interval_s": 0.1, **settings}
        self._data_dir = data_dir
        self.rpcs: Counter[str] = Counter()
        self.received: list[tuple[str, str]] = []
        self.calls: list[Call] = []
        self.delays_s: dict[str, float] = {}
        self._faults: dict[str, list[Fault]] = {}
        self._server: EngineServer | None = None
        self.engine = make_engine()

    # ---- lives ----

    async def start(self) -> None:
        self.engine = self._make_engine()
        self.engine.calls = self.calls
        settings = KitSettings(data_dir=self._data_dir, **self._settings)
        self._server = EngineServer(
            self.engine,
            settings,
            interceptors=[_Faults(self), *self._interceptors],
            **self._clock,
        )
        await self._server.start()
        # A later life is found at the same place.
        self._settings["admin_address"] = self._server.admin_address
        self._settings["inference_address"] = self._server.inference_address

    async def kill(self) -> None:
        """Gone at once: streams break off, and what runs gets no end in the store."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    @property
    def server(self) -> EngineServer:
        assert self._server is not None, "the engine is not running"
        return self._server

    @property
    def admin_address(self) -> str:
        return str(self._settings["admin_address"])

    @property
    def inference_address(self) -> str:
        return str(self._settings["inference_address"])

    @property
    def instance_id(self) -> str:
        return self.server.instance_id

    # ---- what happened ----

    @property
    def orders(self) -> list[str]:
        """Operation ids of the engine that reached the ranks, in order, over all lives."""
        return [
            call.operation_id for call in self.calls if (call.phase, call.rank) == ("prepare", 0)
        ]

    # ---- misbehaving ----

    def fail_next(self, method: str, *faults: Fault) -> None:
        """`method` as in the proto, e.g. "Pause": one fault for each of its next calls."""
        self._faults.setdefault(method, []).extend(faults)

    def take_all(self, method: str) -> None:
        """Behave again: the faults that still wait for calls of that method are taken back."""
        self._faults.pop(method, None)

    def take_fault(self, method: str) -> Fault | None:
        waiting = self._faults.get(method)
        return waiting.pop(0) if waiting else None


@asynccontextmanager
async def running_engine(data_dir: Path, **options: Any) -> AsyncIterator[EngineDouble]:
    double = EngineDouble(data_dir, **options)
    await double.start()
    try:
        yield double
    finally:
        await double.kill()


@pytest.fixture
async def engine_double(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    async with running_engine(tmp_path / "engine") as double:
        yield double


class _Faults(grpc.aio.ServerInterceptor):
    def __init__(self, double: EngineDouble) -> None:
        self._double = double

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.rpartition("/")
        if handler is None or "openengine" not in service:
            return handler
        if handler.unary_stream is not None:
            serve = self._stream(method, handler.unary_stream)
            return handler._replace(unary_stream=serve)
        return handler._replace(unary_unary=self._unary(method, handler.unary_unary))

    def _unary(self, method: str, inner: Any) -> Any:
        async def serve(request: Any, context: Any) -> Any:
            fault = await self._arrived(method, request, context)
            answer = await inner(request, context)
            if fault is Fault.HANG:
                await asyncio.Event().wait()
            if fault is not None:
                await _drop(context)
            return answer

        return serve

    def _stream(self, method: str, inner: Any) -> Any:
        async def serve(request: Any, context: Any) -> None:
            fault = await self._arrived(method, request, context)
            await inner(request, context if fault is None else _Cut(context, fault))

        return serve

    async def _arrived(self, method: str, request: Any, context: Any) -> Fault | None:
        double = self._double
        double.rpcs[method] += 1
        double.received.append((method, getattr(request, "idempotency_key", "")))
        if method in double.delays_s:
            await asyncio.sleep(double.delays_s[method])
        fault = double.take_fault(method)
        if fault is Fault.REFUSE_CONNECTION:
            await _drop(context)
        if fault is Fault.UNAUTHENTICATED:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
        return fault


class _Cut:
    """A context whose connection breaks at the first or behind the first message."""

    def __init__(self, context: Any, fault: Fault) -> None:
        self._context = context
        self._fault = fault
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        if self._fault is Fault.HANG:
            await asyncio.Event().wait()
        if self._fault is Fault.LOSE_REPLY or self._written:
            await _drop(self._context)
        self._written += 1
        await self._context.write(message)


async def _drop(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
