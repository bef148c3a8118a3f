"""A client of an engine's two listeners: orders, refusals with their details, requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from app.rpc.openengine.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

pb = admin_pb2
Event = admin_pb2.AdminOperationEvent
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status before acceptance. `fields` are those of BadRequest."""

    code: grpc.StatusCode
    message: str
    reason: str
    domain: str
    metadata: dict[str, str]
    fields: tuple[str, ...]


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    info, fields = error_details_pb2.ErrorInfo(), []
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        bad = error_details_pb2.BadRequest()
        if detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
            fields = [violation.field for violation in bad.field_violations]
    return Refusal(
        error.code(), error.details() or "", info.reason, info.domain, dict(info.metadata),
        tuple(fields),
    )  # fmt: skip


async def refused(call: Any) -> Refusal:
    """The refusal of a unary call or of a stream."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError("the call was not refused")


async def until(holds: Callable[[], Any | Awaitable[Any]], within_s: float = 10.0) -> None:
    """Wait for something that has no event of its own."""
    async with asyncio.timeout(within_s):
        while True:
            value = holds()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            await asyncio.sleep(0.005)


class Observing:
    """An order's stream, read a piece at a time."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.events: list[Event] = []

    async def next(self) -> Event | None:
        """None: the stream has ended OK."""
        event: Any = await self._call.read()
        if not isinstance(event, Event):
            return None
        self.events.append(event)
        return event

    async def accepted(self) -> str:
        """The operation id, from the first event."""
        event = await self.next()
        assert event is not None
        assert event.HasField("accepted")
        return str(event.operation_id)

    async def rest(self) -> list[Event]:
        """All events, those read before included."""
        while await self.next() is not None:
            pass
        return self.events

    async def end(self) -> Event:
        return (await self.rest())[-1]

    def detach(self) -> None:
        self._call.cancel()


class Generation:
    """A request under way: what came back so far, and its end."""

    def __init__(self, call: Any, request_id: str) -> None:
        self.request_id = request_id
        self.responses: list[generation_pb2.GenerateResponse] = []
        self._call = call
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        async for response in self._call:
            self.responses.append(response)
            self._arrived.set()

    @property
    def text(self) -> str:
        return "".join(r.token.text for r in self.responses if r.HasField("token"))

    @property
    def done(self) -> bool:
        return self._task.done()

    async def first(self) -> None:
        """Until something has come back; AioRpcError when that is a refusal."""
        async with asyncio.timeout(TIMEOUT_S):
            arrived = asyncio.ensure_future(self._arrived.wait())
            await asyncio.wait({arrived, self._task}, return_when=asyncio.FIRST_COMPLETED)
            arrived.cancel()
        if not self.responses:
            await self._task

    async def end(self) -> generation_pb2.GenerateResponse:
        """The last response. Raises AioRpcError for a status other than OK."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._task
        return self.responses[-1]

    async def finish_reason(self) -> str:
        end = await self.end()
        return generation_pb2.FinishReason.Name(end.finished.reason).removeprefix("FINISH_REASON_")

    async def refused(self) -> Refusal:
        try:
            await self.end()
        except grpc.aio.AioRpcError as error:
            return refusal_of(error)
        raise AssertionError(f"the request was served: {self.responses}")

    def hang_up(self) -> None:
        self._call.cancel()
        self._task.cancel()


class Client:
    """`admin`, `control` (admin listener), `inference` and `reading` (inference listener)."""

    def __init__(
        self,
        admin: grpc.aio.Channel,
        inference: grpc.aio.Channel,
        *,
        admin_token: str | None = None,
        inference_token: str | None = None,
    ) -> None:
        self.admin_channel = admin
        self.inference_channel = inference
        self.admin = admin_pb2_grpc.OpenEngineAdminStub(admin)
        self.control = openengine_pb2_grpc.ControlStub(admin)
        self.inference = openengine_pb2_grpc.InferenceStub(inference)
        self.reading = openengine_pb2_grpc.ControlStub(inference)
        self.admin_metadata = _bearer(admin_token)
        self.inference_metadata = _bearer(inference_token)
        self._numbers = count(1)
        self._name = uuid4().hex[:8]

    # ---- orders ----

    def stream(self, request: Any) -> Any:
        """The call of an order, its method known from the type of the request."""
        method = request.DESCRIPTOR.name.removesuffix("Request")
        return getattr(self.admin, method)(request, timeout=TIMEOUT_S, metadata=self.admin_metadata)

    async def begin(self, request: Any) -> Observing:
        """The order, accepted; its first event is read."""
        observing = Observing(self.stream(request))
        await observing.accepted()
        return observing

    async def order(self, request: Any) -> list[Event]:
        """Every event, to the end of the stream."""
        return [event async for event in self.stream(request)]

    async def completed(self, request: Any) -> pb.OperationCompleted:
        """Raises AssertionError for another end."""
        last = (await self.order(request))[-1]
        assert last.HasField("completed"), last
        return last.completed

    async def failed(self, request: Any) -> pb.OperationFailed:
        last = (await self.order(request))[-1]
        assert last.HasField("failed"), last
        return last.failed

    def key(self) -> str:
        return f"key-{self._name}-{next(self._numbers)}"

    def pause(self, mode: str = "drain", **fields: Any) -> pb.PauseRequest:
        number = pb.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")
        fields.setdefault("idempotency_key", self.key())
        if isinstance(fields.get("new_requests"), str):
            name = f"NEW_REQUESTS_{fields['new_requests'].upper()}"
            fields["new_requests"] = pb.NewRequests.Value(name)
        return pb.PauseRequest(mode=number, **fields)

    def resume(self, epoch: int, **fields: Any) -> pb.ResumeRequest:
        fields.setdefault("idempotency_key", self.key())
        return pb.ResumeRequest(pause_epoch=epoch, **fields)

    def flush(self, **fields: Any) -> pb.FlushCachesRequest:
        fields.setdefault("idempotency_key", self.key())
        fields.setdefault("caches", [pb.CACHE_KIND_PREFIX])
        return pb.FlushCachesRequest(**fields)

    def release(
        self, *resources: str, content: str = "preserve", drain: str = "wait", **fields: Any
    ) -> pb.ReleaseResourcesRequest:
        fields.setdefault("idempotency_key", self.key())
        return pb.ReleaseResourcesRequest(
            resources=_resources(resources),
            content=pb.ContentPolicy.Value(f"CONTENT_POLICY_{content.upper()}"),
            drain=pb.DrainRule.Value(f"DRAIN_RULE_{drain.upper()}"),
            **fields,
        )

    def restore(self, *resources: str, epoch: int, **fields: Any) -> pb.RestoreResourcesRequest:
        fields.setdefault("idempotency_key", self.key())
        return pb.RestoreResourcesRequest(
            resources=_resources(resources), release_epoch=epoch, **fields
        )

    def update(
        self,
        version: str = "v2",
        *,
        pause: str | None = None,
        cache: str = "flush",
        **fields: Any,
    ) -> pb.UpdateWeightsRequest:
        """`pause`: the mode of a pause of its own; None: under the pause that is in force."""
        fields.setdefault("idempotency_key", self.key())
        if not {"disk", "tensors", "distributed", "session"} & set(fields):
            fields["disk"] = pb.DiskWeights(path="/models/new")
        fields.setdefault("components", [pb.COMPONENT_TARGET])
        if "under_pause" not in fields and pause is None:
            fields["under_pause"] = pb.UnderPause()
        if pause is not None:
            fields["pause"] = pb.PauseAround(mode=pb.PauseMode.Value(f"PAUSE_MODE_{pause.upper()}"))
        return pb.UpdateWeightsRequest(
            weight_version=version,
            cache_policy=pb.CachePolicy.Value(f"CACHE_POLICY_{cache.upper()}"),
            **fields,
        )

    def reconfigure(self, *, drain: str = "wait", **fields: Any) -> pb.ReconfigureServingRequest:
        fields.setdefault("idempotency_key", self.key())
        if isinstance(fields.get("role"), str):
            fields["role"] = server_pb2.EngineRole.Value(f"ENGINE_ROLE_{fields['role'].upper()}")
        rule = pb.DrainRule.Value(f"DRAIN_RULE_{drain.upper()}")
        return pb.ReconfigureServingRequest(drain=rule, **fields)

    def start_profile(self, kind: str = "torch", **fields: Any) -> Any:
        """The call, under way."""
        fields.setdefault("idempotency_key", self.key())
        number = pb.ProfilerKind.Value(f"PROFILER_KIND_{kind.upper()}")
        return self.stream(pb.StartProfileRequest(kind=number, **fields))

    def stop_profile(self, profile_id: str, **fields: Any) -> Any:
        fields.setdefault("idempotency_key", self.key())
        return self.stream(pb.StopProfileRequest(profile_id=profile_id, **fields))

    async def profile(self) -> pb.AdminProfile:
        # An engine that is back may be behind a channel that still waits to try it again.
        return await self.admin.GetAdminProfile(
            pb.GetAdminProfileRequest(),
            timeout=TIMEOUT_S,
            metadata=self.admin_metadata,
            wait_for_ready=True,
        )

    async def admission(self) -> str:
        state = (await self.profile()).state.admission
        return pb.AdmissionState.Name(state).removeprefix("ADMISSION_STATE_").lower()

    async def operation(self, **lookup: str) -> pb.AdminOperation:
        return await self.admin.GetOperation(
            pb.GetAdminOperationRequest(**lookup), timeout=TIMEOUT_S, metadata=self.admin_metadata
        )

    async def cancel(self, operation_id: str) -> pb.AdminOperation:
        answer = await self.admin.CancelOperation(
            pb.CancelAdminOperationRequest(operation_id=operation_id),
            timeout=TIMEOUT_S,
            metadata=self.admin_metadata,
        )
        return answer.operation

    # ---- requests ----

    def generate(self, prompt: str = "one two three", **fields: Any) -> Generation:
        fields.setdefault("request_id", f"request-{self._name}-{next(self._numbers)}")
        request = generation_pb2.GenerateRequest(prompt=prompt, **fields)
        call = self.inference.Generate(request, timeout=TIMEOUT_S, metadata=self.inference_metadata)
        return Generation(call, request.request_id)

    async def load(self) -> server_pb2.LoadInfo:
        return await self.reading.GetLoad(
            server_pb2.GetLoadRequest(), timeout=TIMEOUT_S, metadata=self.inference_metadata
        )

    async def held(self, requests: int) -> None:
        """Until that many requests are held."""

        async def reached() -> bool:
            return (await self.profile()).state.pause.requests_held == requests

        await until(reached)

    async def health(self, service: str, *, admin: bool = False) -> str:
        channel = self.admin_channel if admin else self.inference_channel
        answer: Any = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S
        )
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _resources(names: tuple[str, ...]) -> list[Any]:
    return [pb.ResourceKind.Value(f"RESOURCE_KIND_{name.upper()}") for name in names]


def _bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


@asynccontextmanager
async def client_of(double: Any, **tokens: str | None) -> AsyncIterator[Client]:
    async with (
        grpc.aio.insecure_channel(double.admin_address) as admin,
        grpc.aio.insecure_channel(double.inference_address) as inference,
    ):
        yield Client(admin, inference, **tokens)


def shape(events: list[Event]) -> list[str]:
    """The kinds of events, for reading a stream at a glance."""
    return [event.WhichOneof("event") or "" for event in events]


def assert_whole(events: list[Event]) -> None:
    """Numbered 1, 2, 3 …, accepted first, one end, last."""
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    kinds = shape(events)
    assert kinds[0] == "accepted"
    ends = [kind for kind in kinds if kind in ("completed", "failed", "cancelled")]
    assert ends == kinds[-1:]
    assert len({event.operation_id for event in events}) == 1
