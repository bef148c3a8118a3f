"""An engine behind real gRPC that does what a test tells it, faults included.

It keeps its orders by key as an engine does, so that attaching again replays. What is scripted is
how the conversation goes wrong: refusals, cut streams, silence, nonsense.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from app.rpc.openengine.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lifecycle_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

Event = admin_pb2.AdminOperationEvent


def status_with_info(code: grpc.StatusCode, reason: str, text: str = "secret text") -> Any:
    """As an engine refuses."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="engine.test"))
    status = status_pb2.Status(code=code.value[0], message=text, details=[info])
    return rpc_status.to_status(status)


def accepted(instance_id: str = "i-1") -> Event:
    return Event(accepted=admin_pb2.OperationAccepted(instance_id=instance_id, revision=7))


def progress(phase: str = "draining", done: int = 0, total: int = 0) -> Event:
    said = admin_pb2.OperationProgress(phase=phase, done=done, total=total, unit="requests")
    return Event(progress=said)


def paused(epoch: int = 3) -> Event:
    return Event(
        completed=admin_pb2.OperationCompleted(
            changed=True,
            revision=8,
            verification=admin_pb2.VERIFICATION_VERIFIED,
            pause=admin_pb2.PauseResult(pause_epoch=epoch, requests_finished=2),
        )
    )


def failed(reason: str = "RANK_LOST") -> Event:
    return Event(
        failed=admin_pb2.OperationFailed(
            code=13,
            reason=reason,
            message="rank 1 is gone",
            ranks=[1],
            revision=9,
            effect=admin_pb2.FAILURE_EFFECT_ROLLED_BACK,
        )
    )


def cancelled() -> Event:
    return Event(cancelled=admin_pb2.OperationCancelled(message="as asked", revision=8))


@dataclass
class KeptOrder:
    """One operation as the engine keeps it. `told` wakes its streams."""

    operation_id: str
    key: str
    kind: int
    instance_id: str
    request: Any
    events: list[Event] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        ends = ("completed", "failed", "cancelled")
        return bool(self.events) and self.events[-1].WhichOneof("event") in ends

    def tell(self, *events: Event) -> None:
        for event in events:
            numbered = Event()
            numbered.CopyFrom(event)
            numbered.operation_id = self.operation_id
            numbered.sequence = len(self.events) + 1
            numbered.time_unix_nanos = 1_700_000_000_000_000_000
            self.events.append(numbered)
        self.told.set()


@dataclass
class Script:
    """What goes wrong with the next orders. Each list is used up from its front.

    `refusals`: statuses before acceptance. `cuts`: after how many events the stream breaks off,
    with `cut_status` or UNAVAILABLE; `ends`: after how many it ends OK without a terminal event.
    `deaf`: so many orders are dropped with UNAVAILABLE before the engine has taken them on.
    `raw`: events sent as they are, whatever they are.
    """

    refusals: list[Any] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    cut_status: Any = None
    ends: list[int] = field(default_factory=list)
    deaf: int = 0
    raw: list[Sequence[Event]] = field(default_factory=list)


class ScriptedEngine(admin_pb2_grpc.OpenEngineAdminServicer, openengine_pb2_grpc.ControlServicer):
    """`calls`: method and key of each call, in order. `answers`: events that an accepted order
    tells at once; a test tells the rest through `orders[key].tell(…)`."""

    def __init__(
        self, *, instance_id: str = "i-1", orders: dict[str, KeptOrder] | None = None
    ) -> None:
        self.instance_id = instance_id
        self.orders: dict[str, KeptOrder] = {} if orders is None else orders
        self.calls: list[tuple[str, str]] = []
        self.metadata: list[dict[str, str]] = []
        self.script = Script()
        self.answers: Callable[[Any], Sequence[Event]] = lambda _: (accepted(self.instance_id),)
        self.profile = profile()
        self.control_down = False
        self.answering = asyncio.Event()  # cleared: reads are not answered
        self.answering.set()
        self.aborts: dict[str, Any] = {}
        self.read_refusal: Any = None
        self.on_cancel: Callable[[KeptOrder], None] = lambda order: order.tell(cancelled())
        self._numbers = itertools.count(len(self.orders) + 1)
        self._server: grpc.aio.Server | None = None
        self.port = 0

    # ---- life ----

    async def start(
        self,
        port: int = 0,
        *,
        address: str | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> str:
        """The address it listens on."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        admin_pb2_grpc.add_OpenEngineAdminServicer_to_server(self, server)
        openengine_pb2_grpc.add_ControlServicer_to_server(self, server)
        target = address or f"127.0.0.1:{port}"
        if credentials is None:
            self.port = server.add_insecure_port(target)
        else:
            self.port = server.add_secure_port(target, credentials)
        await server.start()
        self._server = server
        return address or f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    def sent(self, key: str) -> int:
        """How often an order has arrived under that key."""
        return sum(1 for method, seen in self.calls if seen == key and method in _ORDERS)

    # ---- orders ----

    async def _order(
        self, method: str, kind: int, request: Any, context: Any
    ) -> AsyncIterator[Event]:
        key = request.idempotency_key
        self.calls.append((method, key))
        self.metadata.append(dict(context.invocation_metadata()))
        script = self.script
        if script.refusals:
            await context.abort_with_status(script.refusals.pop(0))
        if script.raw:
            for event in script.raw.pop(0):
                yield event
            return
        if script.deaf:
            script.deaf -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        order = self.orders.get(key)
        if order is None:
            order = KeptOrder(f"e-{next(self._numbers)}", key, kind, self.instance_id, request)
            self.orders[key] = order
            order.tell(*self.answers(request))
        elif order.request != request:
            await context.abort_with_status(
                status_with_info(grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED")
            )
        cut = script.cuts.pop(0) if script.cuts else None
        end = script.ends.pop(0) if script.ends else None
        heard = 0
        async for event in _told(order):
            if heard == cut:
                break
            if heard == end:
                return
            yield event
            heard += 1
        if cut is not None:
            if script.cut_status is not None:
                await context.abort_with_status(script.cut_status)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    async def FlushCaches(self, request: Any, context: Any) -> AsyncIterator[Event]:  # noqa: N802
        async for event in self._order("FlushCaches", 1, request, context):
            yield event

    async def Pause(self, request: Any, context: Any) -> AsyncIterator[Event]:  # noqa: N802
        async for event in self._order("Pause", 2, request, context):
            yield event

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[Event]:  # noqa: N802
        async for event in self._order("Resume", 3, request, context):
            yield event

    async def ReleaseResources(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[Event]:
        async for event in self._order("ReleaseResources", 4, request, context):
            yield event

    async def RestoreResources(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[Event]:
        async for event in self._order("RestoreResources", 5, request, context):
            yield event

    async def UpdateWeights(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[Event]:
        async for event in self._order("UpdateWeights", 6, request, context):
            yield event

    async def ReconfigureServing(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[Event]:
        async for event in self._order("ReconfigureServing", 8, request, context):
            yield event

    async def GetOperation(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("GetOperation", request.idempotency_key))
        await self._answer(context)
        order = self.orders.get(request.idempotency_key)
        if order is None:
            await context.abort_with_status(
                status_with_info(grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND")
            )
            raise AssertionError("unreachable")
        return self._record(order)

    async def CancelOperation(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("CancelOperation", request.operation_id))
        if self.script.refusals:
            await context.abort_with_status(self.script.refusals.pop(0))
        order = next(o for o in self.orders.values() if o.operation_id == request.operation_id)
        self.on_cancel(order)
        return admin_pb2.CancelAdminOperationResponse(operation=self._record(order))

    async def JoinGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("JoinGroup", request.group.group))
        await self._answer(context)
        return admin_pb2.JoinGroupResponse()

    async def GetAdminProfile(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("GetAdminProfile", ""))
        self.metadata.append(dict(context.invocation_metadata()))
        await self._answer(context)
        told = admin_pb2.AdminProfile()
        told.CopyFrom(self.profile)
        if told.instance_id:
            told.instance_id = self.instance_id
        return told

    def _record(self, order: KeptOrder) -> Any:
        record = admin_pb2.AdminOperation(
            operation_id=order.operation_id,
            idempotency_key=order.key,
            kind=admin_pb2.AdminOperationKind.ValueType(order.kind),
            instance_id=order.instance_id,
            state=admin_pb2.ADMIN_OPERATION_STATE_RUNNING,
            last_sequence=len(order.events),
        )
        if order.ended:
            last = order.events[-1]
            said = str(last.WhichOneof("event"))
            record.state = {
                "completed": admin_pb2.ADMIN_OPERATION_STATE_SUCCEEDED,
                "failed": admin_pb2.ADMIN_OPERATION_STATE_FAILED,
                "cancelled": admin_pb2.ADMIN_OPERATION_STATE_CANCELLED,
            }[said]
            getattr(record, said).CopyFrom(getattr(last, said))
        return record

    # ---- the core Control service ----

    async def _answer(self, context: Any) -> None:
        await self.answering.wait()
        if isinstance(self.read_refusal, grpc.StatusCode):
            await context.abort(self.read_refusal, "secret text")
        if self.read_refusal is not None:
            await context.abort_with_status(self.read_refusal)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("GetServerInfo", ""))
        if self.control_down:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "down")
        info = server_pb2.ServerInfo(
            engine_name="scripted",
            engine_version="1",
            instance_id=self.instance_id,
            supported_models=["tiny"],
            engine_role=server_pb2.ENGINE_ROLE_AGGREGATED,
        )
        info.parallelism.tensor_parallel_size = 2
        info.extra.update({"openengine_admin": True, "api_key": "canary"})
        return info

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return model_pb2.ModelInfo(model_id=request.model, max_context_length=128)

    async def GetLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._answer(context)
        load = server_pb2.LoadInfo(
            instance_id=self.instance_id, running_requests=3, queued_requests=0
        )
        load.attributes["token"] = "canary"
        told = {"rank": 1, "weights_bytes": 4096, "in_use_bytes": 0, "secret": "canary"}
        odd = {"rank": 2, "weights_bytes": "canary", "kv_cache_bytes": -1, "kept_bytes": 0.5}
        rows: list[Any] = [told, odd, {"weights_bytes": 1}, "canary", {"rank": 2**60}]
        load.attributes["memory"] = rows
        return load

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        which = request.WhichOneof("target")
        key = request.request_id if which == "request_id" else str(which)
        self.calls.append(("Abort", key))
        outcome = self.aborts.get(key, lifecycle_pb2.ABORT_STATUS_ABORTED)
        if isinstance(outcome, grpc.StatusCode):
            await context.abort(outcome, "secret text")
        if not isinstance(outcome, int):
            await context.abort_with_status(outcome)
        return lifecycle_pb2.AbortResponse(status=lifecycle_pb2.AbortStatus.ValueType(outcome))

    async def Health(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    LoadLora = UnloadLora = ListLoras = Health
    GetKvEventSources = SubscribeKvEvents = Health  # type: ignore[assignment]
    StartProfile = StopProfile = Health


_ORDERS = frozenset(
    {
        "FlushCaches",
        "Pause",
        "Resume",
        "ReleaseResources",
        "RestoreResources",
        "UpdateWeights",
        "ReconfigureServing",
    }
)


async def _told(order: KeptOrder) -> AsyncIterator[Event]:
    """From the first event to the terminal one."""
    for number in itertools.count():
        while number >= len(order.events):
            if order.ended:
                return
            order.told.clear()
            await order.told.wait()
        yield order.events[number]


def profile() -> admin_pb2.AdminProfile:
    """Of an engine that is open and can do what this release orders."""
    return admin_pb2.AdminProfile(
        operations=[
            admin_pb2.OperationSupport(kind=admin_pb2.ADMIN_OPERATION_KIND_FLUSH_CACHES),
            admin_pb2.OperationSupport(kind=admin_pb2.ADMIN_OPERATION_KIND_PAUSE, cancellable=True),
            admin_pb2.OperationSupport(kind=admin_pb2.ADMIN_OPERATION_KIND_RESUME),
            admin_pb2.OperationSupport(kind=admin_pb2.ADMIN_OPERATION_KIND_ABORT_REQUESTS),
        ],
        cache_kinds=[admin_pb2.CACHE_KIND_PREFIX],
        pause_modes=[
            admin_pb2.PAUSE_MODE_DRAIN,
            admin_pb2.PAUSE_MODE_ABORT,
            admin_pb2.PAUSE_MODE_KEEP,
        ],
        new_requests=[admin_pb2.NEW_REQUESTS_HOLD, admin_pb2.NEW_REQUESTS_REFUSE],
        models=["tiny"],
        world_size=1,
        instance_id="i-1",
        revision=7,
        revision_source=admin_pb2.REVISION_SOURCE_ENGINE,
        pause_epoch=2,
        state=admin_pb2.AdminState(
            admission=admin_pb2.ADMISSION_STATE_OPEN,
            weights=admin_pb2.WeightsStatus(version="v1", state=admin_pb2.WEIGHTS_STATE_VALID),
            role=server_pb2.ENGINE_ROLE_AGGREGATED,
        ),
    )
