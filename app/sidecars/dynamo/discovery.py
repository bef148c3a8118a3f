"""What a worker is and offers, found out once, without changing anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from app.sidecars.answers import Answer, Unreadable
from app.sidecars.dynamo.answers import Metrics, metrics_of
from app.sidecars.dynamo.belief import Identity
from app.sidecars.dynamo.workers import ROUTES, Routes, WorkerKind
from app.sidecars.http import EngineHttp, NoAnswer, WrongAnswer

# Reads that one kind alone has, and the field by which it is told.
_TOLD_BY = {
    WorkerKind.VLLM: ("get_weight_version", "version_declared"),
    WorkerKind.VLLM_SIDECAR: ("control/is_paused", "is_paused"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """In seconds: Unix time, and the one of this machine that is never set."""

    now: Callable[[], float] = time.time
    since_boot: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """`tells_pause`, `tells_version`: whether the kind's reads are there. `adapters`: the worker
    lists them."""

    kind: WorkerKind
    identity: Identity
    model: str
    tells_pause: bool = False
    tells_version: bool = False
    adapters: bool = False

    @property
    def version(self) -> str:
        """A worker does not tell which release of Dynamo it is."""
        return f"{self.kind.value} worker"

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    @property
    def routes(self) -> Routes:
        return ROUTES[self.kind]


async def discover(
    http: EngineHttp,
    clocks: Clocks,
    *,
    kind: WorkerKind | None = None,
    model: str | None = None,
) -> Discovered:
    """`kind` None: one that can be told. Raises NotSent, NoAnswer (among others: it serves no
    endpoint yet), Refused, WrongAnswer."""
    metrics = metrics_of(await http.read("/metrics"))
    identity = identity_of(metrics, clocks)
    if identity.started_at is None:
        raise WrongAnswer("no system server of a Dynamo worker answers there")
    if metrics.in_flight is None:
        raise NoAnswer("the worker serves no endpoint yet")
    served = model or metrics.model
    if served is None:
        raise WrongAnswer("the worker does not tell its model: name it (--model)")
    kind = kind or await _kind(http)
    routes = ROUTES[kind]
    return Discovered(
        kind=kind,
        identity=identity,
        model=served,
        tells_pause=routes.paused is not None and await _reads(http, *routes.paused),
        tells_version=routes.version is not None and await _reads(http, *routes.version),
        adapters=routes.load_lora is not None and (await http.get("/v1/loras")).status == 200,
    )


def identity_of(metrics: Metrics, clocks: Clocks) -> Identity:
    uptime_s = metrics.uptime_s
    if uptime_s is None:
        return Identity(metrics.worker_id, None)
    return Identity(metrics.worker_id, clocks.now() - uptime_s, clocks.since_boot() - uptime_s)


async def _kind(http: EngineHttp) -> WorkerKind:
    for kind, (path, field) in _TOLD_BY.items():
        if await _reads(http, path, field):
            return kind
    raise WrongAnswer("the kind of this worker cannot be told: name it (--worker)")


async def _reads(http: EngineHttp, path: str, field: str) -> bool:
    return _has(await http.get(f"/engine/{path}"), field)


def _has(answer: Answer, field: str) -> bool:
    try:
        found = answer.json()
    except Unreadable:
        return False
    return answer.status == 200 and isinstance(found, dict) and field in found
