"""gRPC health of both listeners, kept in step with the administrative state."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from app.enginekit.state import EngineState

INFERENCE = "openengine.v1.Inference"
ADMIN = "openengine.v1.OpenEngineAdmin"
VLLM_CONTROL = "vllm.Control"

_S = health_pb2.HealthCheckResponse.ServingStatus


class HealthBoard:
    """ "" is liveness: SERVING as long as this process can answer. `Inference` is readiness, and
    `OpenEngineAdmin` says whether an order could be taken on."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._servicers: list[Any] = []
        self._wanted = asyncio.Event()

    def serve_on(self, server: Any) -> None:
        servicer: Any = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        self._servicers.append(servicer)

    def note(self) -> None:
        """Something may have changed. From the event loop, at any time."""
        self._wanted.set()

    async def publish(self) -> None:
        """What holds now, to Check and to Watch."""
        statuses = {
            "": _S.SERVING,
            INFERENCE: self._inference(),
            ADMIN: self._admin(),
            VLLM_CONTROL: self._admin(),
        }
        for servicer in self._servicers:
            for service, status in statuses.items():
                await servicer.set(service, status)

    async def run(self) -> None:
        """For ever: publish after each note."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.publish()

    async def stop(self) -> None:
        """NOT_SERVING for good; liveness too, since nothing new is answered from here on."""
        for servicer in self._servicers:
            await servicer.enter_graceful_shutdown()

    def _inference(self) -> Any:
        return _S.SERVING if self._state.facts().serving else _S.NOT_SERVING

    def _admin(self) -> Any:
        return _S.NOT_SERVING if self._state.journal.broken else _S.SERVING
