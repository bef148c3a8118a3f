"""Wrong about adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from app.domain.commands import UnloadLora
from app.enginekit.runtime import Order, RequestRefused
from app.rpc.openengine.v1 import generation_pb2, lora_pb2
from tests.conformance.complete_engine import CompleteEngine
from tests.conformance.faulty import Fault, Forged, Refusing


class ListsNoAdapters(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "ListLoras":
            del answer.adapters[:]
        return answer


class HidesAdapters(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            del answer.state.loras[:]
        return answer


class ForgetsWhereFrom(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "LoadLora":
            answer.adapter.source_path = "/"
        return answer


class AlwaysNewlyLoaded(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "LoadLora":
            answer.already_loaded = False
        return answer


class OneLoaderAtATime(Fault):
    """The same load at once is refused, as if it were another."""

    def __init__(self) -> None:
        super().__init__()
        self._loading = 0

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method != "LoadLora":
            return None
        self._loading += 1
        try:
            await asyncio.sleep(0.05)
            if self._loading > 1:
                raise Refusing(grpc.StatusCode.ABORTED)
        finally:
            self._loading -= 1
        return None


class TakesOtherSource(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method == "LoadLora" and status.code is grpc.StatusCode.ALREADY_EXISTS:
            raise Forged(lora_pb2.LoadLoraResponse(adapter=request.adapter))
        await super().refuse(method, request, context, status)


class UnloadsAnything(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method == "UnloadLora" and status.code is grpc.StatusCode.NOT_FOUND:
            adapter = lora_pb2.LoraAdapter(lora_name=request.lora_name)
            raise Forged(lora_pb2.UnloadLoraResponse(adapter=adapter))
        await super().refuse(method, request, context, status)


class NamesTheNameless(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "UnloadLora":
            request.lora_name = request.lora_name or "default"
        return request


class LoadsFromAnywhere(CompleteEngine):
    def check_path(self, path: Path) -> None:
        """Whatever it is."""


class UnloadsUnderRequests(CompleteEngine):
    def check_idle(self, name: str) -> None:
        """Whoever uses it."""


class UnloadEndsRequests(CompleteEngine):
    async def prepare(self, order: Order, rank: int) -> None:
        if isinstance(order.command, UnloadLora):
            await self.abort(None, "their adapter is needed elsewhere")
        await super().prepare(order, rank)


class ComputesWithout(CompleteEngine):
    def ending_of(self, request: generation_pb2.GenerateRequest) -> str:
        try:
            return super().ending_of(request)
        except RequestRefused:
            return ""


class AdapterForAll(CompleteEngine):
    def ending_of(self, request: generation_pb2.GenerateRequest) -> str:
        return super().ending_of(request) or "".join(f"-{one.name}" for one in self.held[0].loras)
