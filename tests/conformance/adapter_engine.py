"""A right engine with adapters: each request has its own, and none is taken from under one."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from app.domain.commands import LoadLora, UnloadLora
from app.enginekit.runtime import Feature, Order, RequestRefused, RuntimeFault
from app.rpc.openengine.v1 import error_pb2, generation_pb2
from tests.conformance.paced_engine import PacedEngine
from tests.enginekit.full_engine import FullEngine


class AdapterEngine(PacedEngine, FullEngine):
    """`lora_root`: where adapters may lie, folders of any content. Under one, every word ends with
    its name."""

    lora_root = Path("/nowhere")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.features |= {Feature.LORA}
        self.using: Counter[str] = Counter()

    async def prepare(self, order: Order, rank: int) -> None:
        await super().prepare(order, rank)
        match order.command:
            case LoadLora(path=path):
                self.check_path(Path(path))
            case UnloadLora(name=name):
                self.check_idle(name)

    def check_path(self, path: Path) -> None:
        folder = path.resolve()
        if not folder.is_relative_to(self.lora_root.resolve()) or not folder.is_dir():
            raise RuntimeFault("ADAPTER_REFUSED", "not there, or not below an allowed root")

    def check_idle(self, name: str) -> None:
        if self.using[name]:
            raise RuntimeFault("LORA_IN_USE", "requests use the adapter", retryable=True)

    def ending_of(self, request: generation_pb2.GenerateRequest) -> str:
        """Of each word. Raises RequestRefused."""
        name = request.lora_name
        if name and all(lora.name != name for lora in self.held[0].loras):
            raise RequestRefused(error_pb2.ERROR_CODE_MODEL_NOT_FOUND, "no such adapter")
        return f"-{name}" if name else ""

    async def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        ending = self.ending_of(request)
        changed = generation_pb2.GenerateRequest()
        changed.CopyFrom(request)
        changed.prompt = " ".join(f"{word}{ending}" for word in request.prompt.split())
        self.using[request.lora_name] += 1
        try:
            async with aclosing(super().generate(changed)) as said:  # type: ignore[type-var]
                async for response in said:
                    yield response
        finally:
            self.using[request.lora_name] -= 1
