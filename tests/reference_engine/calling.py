"""A served engine's clients: both listeners over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from app.reference_engine.serving import ServedEngine
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import (
    admin_pb2_grpc,
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    openengine_pb2_grpc,
    server_pb2,
)
from tests.reference_engine.serving import PATIENCE_S, PROMPT

_KEYS = count()


@dataclass
class Heard:
    """What a Generate stream said."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    came_at: list[float] = field(default_factory=list)  # of each message with tokens
    finished: generation_pb2.GenerationFinished | None = None
    error: error_pb2.EngineError | None = None
    usage: generation_pb2.Usage | None = None
    status: grpc.StatusCode | None = None
    detail: str = ""
    reason: str = ""
    session: kv_pb2.KvSessionRef | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def cached(self) -> int:
        assert self.usage is not None
        return self.usage.cached_prompt_tokens


class Call:
    """One Generate RPC, read in the background."""

    def __init__(self, stub: Any, request: generation_pb2.GenerateRequest) -> None:
        self.heard = Heard()
        self.request_id = request.request_id
        self._rpc = stub.Generate(request, timeout=PATIENCE_S)
        self._arrived = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self._rpc:
                self._take(response)
                async with self._arrived:
                    self._arrived.notify_all()
        except grpc.aio.AioRpcError as error:
            self.heard.status = error.code()
            self.heard.detail = error.details() or ""
            self.heard.reason = _reason(error)

    def _take(self, response: generation_pb2.GenerateResponse) -> None:
        heard = self.heard
        match response.WhichOneof("event"):
            case "token":
                heard.text += response.token.text
                heard.came_at.append(time.perf_counter())
                heard.ids += [token.token_id for token in response.token.tokens]
            case "prefill_ready":
                heard.session = response.prefill_ready.kv_session
            case "finished":
                heard.finished = response.finished
            case "error":
                heard.error = response.error
        if response.HasField("usage"):
            heard.usage = response.usage

    @property
    def over(self) -> bool:
        return self._task.done()

    async def after(self, tokens: int) -> Call:
        async with asyncio.timeout(PATIENCE_S), self._arrived:
            await self._arrived.wait_for(lambda: self.heard.tokens >= tokens)
        return self

    async def whole(self) -> Heard:
        await self._task
        return self.heard

    async def hang_up(self) -> None:
        self._rpc.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@dataclass
class Told:
    """The events of one admin operation, read in the background."""

    rpc: Any
    events: list[pb.AdminOperationEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._arrived = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.rpc:
            self.events.append(event)
            async with self._arrived:
                self._arrived.notify_all()

    async def until(self, kind: str) -> pb.AdminOperationEvent:
        """The first event of a kind."""

        def found() -> pb.AdminOperationEvent | None:
            return next((one for one in self.events if one.WhichOneof("event") == kind), None)

        async with asyncio.timeout(PATIENCE_S), self._arrived:
            event = await self._arrived.wait_for(found)
        assert event is not None
        return event

    async def end(self) -> pb.AdminOperationEvent:
        await self._task
        return self.events[-1]

    async def completed(self) -> pb.OperationCompleted:
        end = await self.end()
        assert end.WhichOneof("event") == "completed", end
        return end.completed


class Clients:
    """Stubs for both listeners of one engine."""

    def __init__(self, inference: Any, admin: Any, health: Any) -> None:
        self._inference: Any = openengine_pb2_grpc.InferenceStub(inference)
        self.reading: Any = openengine_pb2_grpc.ControlStub(inference)
        self.control: Any = openengine_pb2_grpc.ControlStub(admin)
        self.admin: Any = admin_pb2_grpc.OpenEngineAdminStub(admin)
        self.health = health

    def generate(
        self, request_id: str, max_tokens: int = 20, *, seed: int = 1, prompt: str = PROMPT
    ) -> Call:
        request = generation_pb2.GenerateRequest(request_id=request_id, prompt=prompt)
        request.sampling.temperature = 1.0
        request.sampling.seed = seed
        request.stopping.max_tokens = max_tokens
        return Call(self._inference, request)

    @staticmethod
    def told(rpc: Any) -> Told:
        """An order that this class knows nothing of."""
        return Told(rpc)

    def send(self, request: generation_pb2.GenerateRequest) -> Call:
        return Call(self._inference, request)

    def pause(self, mode: pb.PauseMode.ValueType, **options: Any) -> Told:
        request = pb.PauseRequest(idempotency_key=key(), mode=mode, **options)
        return Told(self.admin.Pause(request, timeout=PATIENCE_S))

    async def resume(self) -> pb.OperationCompleted:
        epoch = (await self.profile()).pause_epoch
        request = pb.ResumeRequest(idempotency_key=key(), pause_epoch=epoch)
        return await Told(self.admin.Resume(request, timeout=PATIENCE_S)).completed()

    async def flush(self) -> pb.FlushedCache:
        request = pb.FlushCachesRequest(idempotency_key=key(), caches=[pb.CACHE_KIND_PREFIX])
        told = Told(self.admin.FlushCaches(request, timeout=PATIENCE_S))
        (cache,) = (await told.completed()).flush_caches.caches
        return cache

    def release(
        self, *kinds: pb.ResourceKind.ValueType, content: pb.ContentPolicy.ValueType
    ) -> Told:
        request = pb.ReleaseResourcesRequest(
            idempotency_key=key(), resources=kinds, content=content, drain=pb.DRAIN_RULE_WAIT
        )
        return Told(self.admin.ReleaseResources(request, timeout=PATIENCE_S))

    async def restore(self, *kinds: pb.ResourceKind.ValueType) -> pb.OperationCompleted:
        epoch = (await self.profile()).release_epoch
        request = pb.RestoreResourcesRequest(
            idempotency_key=key(), resources=kinds, release_epoch=epoch
        )
        return await Told(self.admin.RestoreResources(request, timeout=PATIENCE_S)).completed()

    def update(self, version: str, **fields: Any) -> Told:
        """Pauses and resumes by itself, unless `under_pause` is given."""
        if "under_pause" not in fields:
            fields.setdefault("pause", pb.PauseAround(mode=pb.PAUSE_MODE_DRAIN))
        fields.setdefault("cache_policy", pb.CACHE_POLICY_FLUSH)
        request = pb.UpdateWeightsRequest(
            idempotency_key=key(),
            weight_version=version,
            components=[pb.COMPONENT_TARGET],
            **fields,
        )
        return Told(self.admin.UpdateWeights(request, timeout=PATIENCE_S))

    async def cancel(self, operation_id: str) -> None:
        request = pb.CancelAdminOperationRequest(operation_id=operation_id)
        await self.admin.CancelOperation(request, timeout=PATIENCE_S)

    async def profile(self) -> pb.AdminProfile:
        profile = await self.admin.GetAdminProfile(pb.GetAdminProfileRequest(), timeout=PATIENCE_S)
        assert isinstance(profile, pb.AdminProfile)
        return profile

    async def load(self, *, per_rank: bool = False) -> server_pb2.LoadInfo:
        request = server_pb2.GetLoadRequest(include_per_rank=per_rank)
        load = await self.control.GetLoad(request, timeout=PATIENCE_S)
        assert isinstance(load, server_pb2.LoadInfo)
        return load

    async def abort(self, request_id: str | None) -> lifecycle_pb2.AbortResponse:
        request = lifecycle_pb2.AbortRequest()
        if request_id is None:
            request.all_requests.SetInParent()
        else:
            request.request_id = request_id
        response = await self.control.Abort(request, timeout=PATIENCE_S)
        assert isinstance(response, lifecycle_pb2.AbortResponse)
        return response


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Of the refusal's ErrorInfo."""
    status: Any = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def key() -> str:
    return f"key-{next(_KEYS)}"


@asynccontextmanager
async def clients_of(engine: ServedEngine) -> AsyncIterator[Clients]:
    from grpc_health.v1 import health_pb2_grpc

    async with (
        grpc.aio.insecure_channel(engine.inference_address) as inference,
        grpc.aio.insecure_channel(engine.admin_address) as admin,
    ):
        yield Clients(inference, admin, health_pb2_grpc.HealthStub(inference))
