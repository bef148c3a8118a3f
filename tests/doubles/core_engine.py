"""An engine that natively speaks `openengine.v1`, `Inference` and `Control`, and nothing else.

    async with running_core_engine() as engine:
        engine.address
        engine.next("LoadLora", Lost())     # what happens to the next such call

Answers are those of such servers: an id that is unknown or over is ALREADY_FINISHED, and what is
not built is UNIMPLEMENTED without a detail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from app.rpc.openengine.v1 import (
    generation_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

H = lifecycle_pb2.HealthState
C = grpc.StatusCode


@dataclass(frozen=True)
class Refuse:
    """Instead of carrying it out."""

    code: grpc.StatusCode = C.INTERNAL


class Lost:
    """Carried out, and the connection ends before the answer."""


class Never:
    """Neither carried out nor answered."""


Fault = Refuse | Lost | Never


class CoreEngine(openengine_pb2_grpc.InferenceServicer, openengine_pb2_grpc.ControlServicer):
    """`loras`: adapters by name; None: it has no calls for them. `running`: requests by id, each
    with what ends it."""

    def __init__(
        self, *, instance_id: str = "core-1", loras: bool = True, token_s: float = 0.002
    ) -> None:
        self.instance_id = instance_id
        self.loras: dict[str, lora_pb2.LoraAdapter] | None = {} if loras else None
        self.health: Any = H.HEALTH_STATE_READY
        self.extra: dict[str, Any] = {"api_key": "canary"}
        self.running: dict[str, asyncio.Event] = {}
        self.token_s = token_s
        self.text = "x"
        self.made = 0  # tokens, of all requests
        self.data_parallel_size = 1
        self.calls: list[tuple[str, Any]] = []
        self.address = ""
        self._faults: dict[str, list[Fault]] = {}
        self._server: grpc.aio.Server | None = None

    def next(self, method: str, *faults: Fault) -> None:
        self._faults.setdefault(method, []).extend(faults)

    def sent(self, method: str) -> list[Any]:
        return [request for called, request in self.calls if called == method]

    # ---- life ----

    async def start(self) -> None:
        """On the same port as before."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        openengine_pb2_grpc.add_InferenceServicer_to_server(self, server)
        openengine_pb2_grpc.add_ControlServicer_to_server(self, server)
        port = server.add_insecure_port(self.address or "127.0.0.1:0")
        await server.start()
        self.address = f"127.0.0.1:{port}"
        self._server = server

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def restart(self) -> None:
        """Another process at the same address, which knows nothing of what was."""
        await self.stop()
        self.instance_id += "+"
        self.running.clear()
        if self.loras is not None:
            self.loras.clear()
        await self.start()

    # ---- Control ----

    async def _fault(self, method: str, request: Any, context: Any) -> Fault | None:
        self.calls.append((method, request))
        waiting = self._faults.get(method)
        fault = waiting.pop(0) if waiting else None
        if isinstance(fault, Refuse):
            await context.abort(fault.code, "secret text")
        if isinstance(fault, Never):
            await asyncio.Event().wait()
        return fault

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._fault("GetServerInfo", request, context)
        info = server_pb2.ServerInfo(
            engine_name="tensorrt_llm",
            engine_version="1.3.0",
            instance_id=self.instance_id,
            supported_models=["tiny"],
            schema_release="v0.1.0",
            schema_revision=1,
        )
        info.parallelism.tensor_parallel_size = 2
        info.parallelism.data_parallel_size = self.data_parallel_size
        info.capacity.max_running_requests = 8
        info.extra.update(self.extra)
        return info

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._fault("GetModelInfo", request, context)
        return model_pb2.ModelInfo(
            model_id="tiny",
            served_model_name="tiny",
            max_context_length=100_000,
            supports_text_input=True,
            supports_token_ids_input=True,
        )

    async def GetLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._fault("GetLoad", request, context)
        return server_pb2.LoadInfo(instance_id=self.instance_id, running_requests=len(self.running))

    async def Health(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._fault("Health", request, context)
        if self.health is None:
            await context.abort(C.UNIMPLEMENTED, "")
        return lifecycle_pb2.HealthResponse(state=self.health)

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        fault = await self._fault("Abort", request, context)
        target = request.WhichOneof("target")
        if target not in ("request_id", "all_requests"):
            await context.abort(C.UNIMPLEMENTED, "")
        named = [request.request_id] if target == "request_id" else list(self.running)
        ended = [self.running[name] for name in named if name in self.running]
        for one in ended:
            one.set()
        if isinstance(fault, Lost):
            await context.abort(C.UNAVAILABLE, "gone")
        status = lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
        if ended:
            status = lifecycle_pb2.ABORT_STATUS_ABORTED
        return lifecycle_pb2.AbortResponse(status=status)

    async def LoadLora(self, request: Any, context: Any) -> Any:  # noqa: N802
        fault = await self._fault("LoadLora", request, context)
        loras = await self._adapters(context)
        adapter = request.adapter
        known = adapter.lora_name in loras
        if not adapter.lora_id:
            adapter.lora_id = len(loras) + 1
        loras[adapter.lora_name] = adapter
        if isinstance(fault, Lost):
            await context.abort(C.UNAVAILABLE, "gone")
        return lora_pb2.LoadLoraResponse(adapter=adapter, already_loaded=known)

    async def UnloadLora(self, request: Any, context: Any) -> Any:  # noqa: N802
        fault = await self._fault("UnloadLora", request, context)
        loras = await self._adapters(context)
        if request.lora_name not in loras:
            await context.abort(C.NOT_FOUND, "secret text")
        adapter = loras.pop(request.lora_name)
        if isinstance(fault, Lost):
            await context.abort(C.UNAVAILABLE, "gone")
        return lora_pb2.UnloadLoraResponse(adapter=adapter)

    async def ListLoras(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._fault("ListLoras", request, context)
        loras = await self._adapters(context)
        return lora_pb2.ListLorasResponse(adapters=list(loras.values()))

    async def _adapters(self, context: Any) -> dict[str, lora_pb2.LoraAdapter]:
        if self.loras is None:
            await context.abort(C.UNIMPLEMENTED, "")
        assert self.loras is not None
        return self.loras

    async def GetKvEventSources(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(C.UNIMPLEMENTED, "")

    async def SubscribeKvEvents(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[Any]:
        await context.abort(C.UNIMPLEMENTED, "")
        yield

    # ---- Inference ----

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """One token after the other until there are enough, or it is ended."""
        await self._fault("Generate", request, context)
        ended = self.running[request.request_id] = asyncio.Event()
        most = request.stopping.max_tokens or 16
        reason = generation_pb2.FINISH_REASON_LENGTH
        try:
            for number in range(most):
                if ended.is_set():
                    reason = generation_pb2.FINISH_REASON_CANCELLED
                    break
                token = generation_pb2.TokenOutput(
                    output_index=0,
                    text=self.text,
                    tokens=[generation_pb2.TokenInfo(token_id=number % 100)],
                )
                yield generation_pb2.GenerateResponse(request_id=request.request_id, token=token)
                self.made += 1
                await asyncio.sleep(self.token_s)
            yield generation_pb2.GenerateResponse(
                request_id=request.request_id,
                finished=generation_pb2.GenerationFinished(output_index=0, reason=reason),
                usage=generation_pb2.Usage(completion_tokens=number + 1),
            )
        finally:
            self.running.pop(request.request_id, None)


@asynccontextmanager
async def running_core_engine(**options: Any) -> AsyncIterator[CoreEngine]:
    engine = CoreEngine(**options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
