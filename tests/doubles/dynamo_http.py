"""The system server of a Dynamo worker, behind a real HTTP server on a free port.

    async with running_worker(Worker("vllm")) as double:
        double.url, double.worker
        double.next("/engine/pause_generation", Hang())   # what happens to the next call of it

What its server itself answers is what Dynamo's runtime 1.6.1 answered (`dynamo_recorded.jsonl`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tests.doubles.dynamo_model import Worker
from tests.doubles.engine_http import After, Answer, Die, EngineDouble, Handler, Hang

_ANY = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
_READS = (
    "liveness_probe", "get_weight_version", "control/is_paused", "control/get_weight_version",
)  # fmt: skip


class DynamoDouble(EngineDouble):
    """`denied`: routes that whoever started the worker keeps from everybody. `label`: the model as
    the endpoint is labelled, None for a worker that has no endpoint yet."""

    def __init__(self, worker: Worker, *, label: str | None = "tiny") -> None:
        super().__init__()
        self.worker = worker
        self.label = label
        self.worker_id = 0x79A1FA28D415E731
        self.denied: set[str] = set()
        self._started_at = time.monotonic() - 100.0

    def orders(self, *routes: str) -> list[tuple[str, Any]]:
        """Calls so far that change something; all or those of these routes."""
        called = [call for call in self.worker.calls if call[0] not in _READS]
        return [call for call in called if not routes or call[0] in routes]

    # ---- serving ----

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            *((method, "/engine/{path:path}", self.engine) for method in _ANY),
            ("GET", "/health", self.health),
            ("GET", "/live", self.health),
            ("GET", "/metrics", self.metrics),
            ("GET", "/metadata", self.metadata),
            ("GET", "/v1/loras", self.loras),
            ("POST", "/v1/loras", self.load_lora),
            ("GET", "/{path:path}", self.nothing),
        ]

    async def die(self) -> None:
        self._dying = asyncio.ensure_future(self.stop())

    async def restart(self, worker: Worker) -> None:
        """Another life on the same port."""
        await self.stop()
        self.worker = worker
        self.worker_id += 1
        self._started_at = time.monotonic()
        await self.start()

    # ---- answers ----

    async def engine(self, request: Request) -> Response:
        """The body is read before anybody looks whether there is such a route, and the method of
        HTTP not at all."""
        path = request.path_params["path"]
        sent = await request.body()
        if not path:
            return PlainTextResponse("Route not found", 404)
        try:
            body = json.loads(sent, parse_constant=_refuse) if sent else {}
        except ValueError as wrong:
            return _error(400, "Invalid JSON", str(wrong))
        callback = self.worker.callbacks().get(path)
        if callback is None or path in self.denied:
            return _error(404, "Route not found", f"Route /engine/{path} not found")
        waiting = self._faults.get(f"/engine/{path}")
        fault = waiting.pop(0) if waiting else None
        if isinstance(fault, Answer):
            return _plain(fault.status, fault.body)
        if isinstance(fault, Die):
            await self.die()
            await asyncio.Event().wait()
        try:
            # As there: it goes on to its end when nobody waits for it any more.
            answer = await asyncio.shield(asyncio.ensure_future(callback(body)))
        except Exception as raised:
            text = f"Python callback failed: {type(raised).__name__}: {raised}"
            return _error(500, "Handler error", text)
        if isinstance(fault, Hang):
            await asyncio.Event().wait()
        return _plain(fault.status, fault.body) if isinstance(fault, After) else _plain(200, answer)

    @property
    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_at

    async def health(self, _: Request) -> Response:
        """Not ready, though its endpoints are, unless an endpoint has a health check of its own."""
        uptime_s = self._uptime_s
        uptime = {"secs": int(uptime_s), "nanos": int(uptime_s % 1 * 1e9)}
        endpoints = {"generate": "ready"} if self.label is not None else {}
        return _plain(503, {"status": "notready", "uptime": uptime, "endpoints": endpoints})

    async def metrics(self, _: Request) -> Response:
        worker = f'worker_id="{self.worker_id:x}"'
        lines = [f"dynamo_component_uptime_seconds{{{worker}}} {self._uptime_s!r}"]
        if self.label is not None:
            labels = (
                'dynamo_component="backend",dynamo_endpoint="generate",dynamo_namespace="dynamo"'
                f',model="{self.label}",{worker}'
            )
            running = len(self.worker.requests)
            lines.append(f"dynamo_component_inflight_requests{{{labels}}} {running}")
        return PlainTextResponse("\n".join(lines) + "\n")

    async def metadata(self, _: Request) -> Response:
        return PlainTextResponse("Discovery metadata not available", 404)

    async def load_lora(self, request: Request) -> Response:
        """By the worker's endpoint of that name, on which no status 200 stands for a failure."""
        if not self.worker.lora or self.worker.kind != "vllm":
            return PlainTextResponse("Route not found", 404)
        told = await self.worker.callbacks()["load_lora"](await request.json())
        return JSONResponse(told, 500 if told["status"] == "error" else 200)

    async def nothing(self, _: Request) -> Response:
        return PlainTextResponse("Route not found", 404)

    async def loras(self, _: Request) -> Response:
        if not self.worker.lora or self.worker.kind != "vllm":
            return PlainTextResponse("Route not found", 404)
        return JSONResponse(self.worker.listed())


def _refuse(name: str) -> Any:
    raise ValueError(f"expected value: {name}")


def _plain(status: int, body: Any) -> Response:
    return PlainTextResponse(json.dumps(body, separators=(",", ":")), status)


def _error(status: int, error: str, message: str) -> Response:
    return _plain(status, {"error": error, "message": message})


@asynccontextmanager
async def running_worker(
    worker: Worker | None = None, *, label: str | None = "tiny"
) -> AsyncIterator[DynamoDouble]:
    double = DynamoDouble(worker or Worker(), label=label)
    await double.start()
    try:
        yield double
    finally:
        await double.stop()
