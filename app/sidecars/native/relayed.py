"""Requests that come through a sidecar, passed on to an engine that speaks their language."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from app.domain.kinds import AbortOutcome
from app.enginekit.runtime import RequestRefused
from app.rpc.openengine.v1 import error_pb2, generation_pb2, lifecycle_pb2
from app.sidecars.http import CallError
from app.sidecars.native.client import C, NativeClient

_E = error_pb2.ErrorCode
_CODES = {
    C.INVALID_ARGUMENT: _E.ERROR_CODE_INVALID_ARGUMENT,
    C.UNIMPLEMENTED: _E.ERROR_CODE_UNSUPPORTED_FEATURE,
    C.NOT_FOUND: _E.ERROR_CODE_MODEL_NOT_FOUND,
    C.RESOURCE_EXHAUSTED: _E.ERROR_CODE_OVERLOADED,
    C.UNAVAILABLE: _E.ERROR_CODE_DRAINING,
}
_CANCELLED = generation_pb2.FinishReason.FINISH_REASON_CANCELLED
_BY_ENGINE = "the engine ended the request before it was finished"
_SETTLE_S = 2.0
_GONE_REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class Relay:
    """`left`: outputs that the engine has not ended. `aborted`: it came to no end of its own."""

    request_id: str
    call: Any
    left: set[int]
    why: str | None = None
    aborted: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Relays:
    def __init__(self, client: NativeClient) -> None:
        self._client = client
        self._running: dict[str, Relay] = {}
        self._gone: dict[str, None] = {}

    @property
    def running(self) -> dict[str, Relay]:
        return dict(self._running)

    def went(self, request_id: str) -> bool:
        """Whether it came through here, and is over."""
        return request_id in self._gone

    async def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """See `Runtime.generate`. Known before anything is awaited."""
        outputs = set(range(max(1, request.sampling.num_sequences)))
        relay = Relay(request.request_id, self._client.generate(request), outputs)
        self._running[request.request_id] = relay
        try:
            async for response in self._responses(relay):
                yield response
        finally:
            relay.call.cancel()
            del self._running[request.request_id]
            self._gone[request.request_id] = None
            if len(self._gone) > _GONE_REMEMBERED:
                del self._gone[next(iter(self._gone))]
            relay.over.set()

    async def _responses(self, relay: Relay) -> AsyncIterator[generation_pb2.GenerateResponse]:
        told = False
        try:
            async for response in relay.call:
                match response.WhichOneof("event"):
                    case "finished":
                        relay.left.discard(response.finished.output_index)
                    case "error" | "prefill_ready":
                        relay.left.clear()
                if response.finished.reason == _CANCELLED:
                    relay.aborted = True
                    response.finished.message = relay.why or response.finished.message
                told = True
                yield response
        except grpc.aio.AioRpcError as error:
            if relay.why is None:
                raise (_broke() if told else _refusal(error)) from error
        except asyncio.CancelledError:  # of the call, when it was hung up
            task = asyncio.current_task()
            if relay.why is None or (task is not None and task.cancelling()):
                raise
        for index in sorted(relay.left):
            relay.aborted = True
            finished = generation_pb2.GenerationFinished(
                output_index=index, reason=_CANCELLED, message=relay.why or _BY_ENGINE
            )
            yield generation_pb2.GenerateResponse(request_id=relay.request_id, finished=finished)

    async def end(self, relays: Iterable[Relay], message: str) -> None:
        """By the engine's own abort; where it does not take it, by hanging up. Whoever reads none
        of what it is sent hears of it later, and nobody waits for that."""
        ending = tuple(relays)
        for relay in ending:
            relay.why = relay.why or message
        await asyncio.gather(*(self._told(relay) for relay in ending))

    async def _told(self, relay: Relay) -> None:
        request = lifecycle_pb2.AbortRequest(request_id=relay.request_id)
        try:
            await self._client.abort(request, _SETTLE_S)
            async with asyncio.timeout(_SETTLE_S):
                await relay.over.wait()
        except (CallError, TimeoutError):
            relay.aborted = relay.aborted or bool(relay.left)
            relay.call.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await relay.over.wait()

    def outcome_of(self, relay: Relay) -> AbortOutcome:
        return AbortOutcome.ABORTED if relay.aborted else AbortOutcome.ALREADY_FINISHED


def _broke() -> RequestRefused:
    text = "the connection to the engine broke"
    return RequestRefused(_E.ERROR_CODE_INTERNAL, text, retryable=True)


def _refusal(error: grpc.aio.AioRpcError) -> RequestRefused:
    code = _CODES.get(error.code(), _E.ERROR_CODE_INTERNAL)
    retryable = error.code() in (C.UNAVAILABLE, C.RESOURCE_EXHAUSTED)
    return RequestRefused(code, "the engine refused the request", retryable=retryable)
