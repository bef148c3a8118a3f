"""Calls to an engine's own `openengine.v1` listener: each has a deadline, and what its answer
proves is told apart, as of calls over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, NoReturn, TypeVar

import grpc

from app.rpc.openengine.v1 import (
    generation_pb2,
    lifecycle_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)
from app.sidecars.answers import shown
from app.sidecars.http import CallError, NoAnswer, NotSent, Patience, Refused

T = TypeVar("T")
C = grpc.StatusCode
# The engine has judged the call, and done nothing.
_JUDGED = frozenset(
    {
        C.INVALID_ARGUMENT,
        C.NOT_FOUND,
        C.ALREADY_EXISTS,
        C.FAILED_PRECONDITION,
        C.OUT_OF_RANGE,
        C.UNIMPLEMENTED,
        C.UNAUTHENTICATED,
        C.PERMISSION_DENIED,
    }
)
_MOST_BYTES = 64 << 20


class NativeClient:
    """`address` is `host:port`. Such listeners are plaintext: they belong on this machine."""

    def __init__(self, address: str, patience: Patience) -> None:
        self.patience = patience
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", _MOST_BYTES),
                ("grpc.enable_http_proxy", 0),  # the engine is a neighbour
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1_000),
                # A call is made once: what becomes of it is for whoever made it to find out.
                ("grpc.enable_retries", 0),
            ],
        )
        self._control: Any = openengine_pb2_grpc.ControlStub(self._channel)
        self._inference: Any = openengine_pb2_grpc.InferenceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def server_info(self) -> server_pb2.ServerInfo:
        request = server_pb2.GetServerInfoRequest()
        info: server_pb2.ServerInfo = await self._read(self._control.GetServerInfo, request)
        return info

    async def model_info(self, model: str) -> model_pb2.ModelInfo:
        request = model_pb2.GetModelInfoRequest(model=model)
        info: model_pb2.ModelInfo = await self._read(self._control.GetModelInfo, request)
        return info

    async def load(self) -> server_pb2.LoadInfo:
        request = server_pb2.GetLoadRequest(include_per_rank=True)
        load: server_pb2.LoadInfo = await self._read(self._control.GetLoad, request)
        return load

    async def health(
        self, *, probe: bool = False, within_s: float | None = None
    ) -> lifecycle_pb2.HealthResponse:
        request = lifecycle_pb2.HealthRequest(include_inference_probe=probe)
        health: lifecycle_pb2.HealthResponse = await self._read(
            self._control.Health, request, within_s
        )
        return health

    async def abort(
        self, request: lifecycle_pb2.AbortRequest, within_s: float
    ) -> lifecycle_pb2.AbortResponse:
        """Sent once. Raises CallError."""
        return await _told(self._control.Abort(request, timeout=within_s))

    def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """The call: it ends when it is cancelled."""
        call: AsyncIterator[generation_pb2.GenerateResponse] = self._inference.Generate(request)
        return call

    async def _read(self, method: Any, request: Any, within_s: float | None = None) -> Any:
        """Raises CallError. Not waited for a connection: it is there, or the engine is not."""
        return await _told(method(request, timeout=within_s or self.patience.read_s))


async def _told(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        fail(error)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise NoAnswer("the connection to the engine was closed") from None


def fail(error: grpc.aio.AioRpcError) -> NoReturn:
    """By what the status proves. Raises CallError."""
    code = error.code()
    if code is C.UNAVAILABLE:
        # So says the library of a connection that was never made. One that broke may have had
        # the call on it.
        unmade = "failed to connect to all addresses" in (error.details() or "")
        kind: type[CallError] = NotSent if unmade else NoAnswer
        raise kind("the engine cannot be reached") from error
    if code in _JUDGED:
        said = shown(error.details() or "") or f"the engine answered {code.name}"
        raise Refused(code.value[0], said) from error
    if code is C.DEADLINE_EXCEEDED:
        raise NoAnswer("the engine did not answer in time") from error
    raise NoAnswer(f"the engine answered {code.name}") from error
