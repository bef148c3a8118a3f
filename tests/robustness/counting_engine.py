"""Engine doubles in a process of their own, which write down what reaches them and what they do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc

from app.enginekit.runtime import Order
from app.rpc.openengine.v1 import admin_pb2
from tests.doubles.engine import EngineDouble
from tests.enginekit.minimal_engine import MinimalEngine
from tests.robustness import crash_points as points
from tests.robustness.crash_points import CrashPoints
from tests.robustness.history import Arrived, Carried, EngineLife, Recorder, Told
from tests.robustness.killed_processes import tell

_KINDS = {
    "FlushCaches": "flush_caches",
    "Pause": "pause",
    "Resume": "resume",
    "ReleaseResources": "release_resources",
    "RestoreResources": "restore_resources",
    "UpdateWeights": "update_weights",
    "ReconfigureServing": "reconfigure_serving",
}
_TOLD = frozenset({"accepted", "completed", "failed", "cancelled"})
_ENDS = {
    admin_pb2.ADMIN_OPERATION_STATE_SUCCEEDED: "completed",
    admin_pb2.ADMIN_OPERATION_STATE_FAILED: "failed",
    admin_pb2.ADMIN_OPERATION_STATE_CANCELLED: "cancelled",
}

# The key of the call that an order came with: what is done for it runs in tasks made from there.
_key: ContextVar[str] = ContextVar("key")


class Watch:
    """Writes down what happens at one engine."""

    def __init__(self, engine: str, recorder: Recorder, crash: CrashPoints | None = None) -> None:
        self.engine = engine
        self.recorder = recorder
        self._crash = crash

    def reach(self, point: str) -> None:
        if self._crash is not None:
            self._crash.reach(point)

    def arrived(self, key: str, kind: str) -> None:
        self.recorder.write(Arrived(engine=self.engine, key=key, kind=kind))
        self.reach(points.ARRIVED)

    def carried(self, phase: str) -> None:
        self.recorder.write(Carried(engine=self.engine, key=_key.get(), phase=phase))

    def told(self, key: str, what: str) -> None:
        self.recorder.write(Told(engine=self.engine, key=key, type=what))


class CountingEngine(MinimalEngine):
    """Every step of a rank takes a random time up to `delay_s`."""

    def __init__(self, watch: Watch, chance: random.Random, delay_s: float) -> None:
        super().__init__(world_size=1)
        self._watch = watch
        self._chance = chance
        self._delay_s = delay_s
        self.cached_blocks = 1

    async def _step(self, phase: str, order: Order, rank: int) -> None:
        if (phase, rank) == ("prepare", 0):
            self._watch.carried("begun")
            self._watch.reach(points.ACCEPTED)
        await asyncio.sleep(self._chance.uniform(0.0, self._delay_s))
        await super()._step(phase, order, rank)
        if phase == "conclude":
            self._watch.carried("done")
            self._watch.reach(points.DONE)
        elif (phase, rank) == ("rollback", 0):
            self._watch.carried("undone")


class Recording(grpc.aio.ServerInterceptor):
    """What arrives, and what is answered."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.strip("/").partition("/")
        if handler is None or not service.endswith("OpenEngineAdmin"):
            return handler
        if method in _KINDS:
            serve = self._order(_KINDS[method], handler.unary_stream)
            return handler._replace(unary_stream=serve)
        if method == "GetOperation":
            return handler._replace(unary_unary=self._record(handler.unary_unary))
        return handler

    def _order(self, kind: str, inner: Any) -> Any:
        async def serve(request: Any, context: Any) -> None:
            _key.set(request.idempotency_key)
            self._watch.arrived(request.idempotency_key, kind)
            await inner(request, _Heard(context, self._watch, request.idempotency_key))

        return serve

    def _record(self, inner: Any) -> Any:
        async def serve(request: Any, context: Any) -> Any:
            found = await inner(request, context)
            if found is not None and found.state in _ENDS:
                self._watch.told(found.idempotency_key, _ENDS[found.state])
            return found

        return serve


class _Heard:
    """The context of a call, with what goes through it written down first."""

    def __init__(self, context: Any, watch: Watch, key: str) -> None:
        self._context = context
        self._watch = watch
        self._key = key
        self._taken_on = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        what = message.WhichOneof("event")
        if what in _TOLD:
            self._watch.told(self._key, what)
        self._taken_on = True
        await self._context.write(message)

    async def abort(self, *how: Any, **more: Any) -> None:
        if not self._taken_on:
            self._watch.told(self._key, "refused")
        await self._context.abort(*how, **more)


def counting_double(
    data_dir: Path, watch: Watch, *, seed: int = 0, delay_s: float = 0.02, **settings: Any
) -> EngineDouble:
    """`settings`: as EngineDouble."""
    chance = random.Random(seed)
    return EngineDouble(
        data_dir,
        make_engine=lambda: CountingEngine(watch, chance, delay_s),
        interceptors=[Recording(watch)],
        **settings,
    )


async def begin(double: EngineDouble, watch: Watch) -> None:
    """A life of it, written down."""
    await double.start()
    watch.recorder.write(EngineLife(engine=watch.engine, instance=double.instance_id))


async def _serve(
    folder: Path,
    ready: Path,
    history: Path,
    seed: int,
    delay_s: float,
    crashes: Path | None,
    names: Sequence[str],
) -> None:
    recorder = Recorder(history)
    crash = None if crashes is None else CrashPoints(crashes, recorder)
    addresses = {}
    for number, name in enumerate(names):
        watch = Watch(name, recorder, crash)
        double = counting_double(folder / name, watch, seed=seed + number, delay_s=delay_s)
        await begin(double, watch)
        addresses[name] = double.admin_address
    tell(ready, addresses)
    await asyncio.Event().wait()


def main(
    folder: Path,
    ready: Path,
    history: Path,
    seed: int,
    delay_s: float,
    crashes: Path | None,
    names: Sequence[str],
) -> None:
    """One engine per name, until it is killed. `delay_s`: each step of an order takes up to so
    long. `crashes`: the folder of the gateway's crash points."""
    asyncio.run(_serve(folder, ready, history, seed, delay_s, crashes, names))
