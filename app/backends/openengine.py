"""An engine that speaks `OpenEngineAdmin` and the core `Control` service, or the latter alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc

from app.backends import aborts, adapters, letters, profiles, readings, status_map
from app.backends.continuing import take_further
from app.backends.core_control import CoreControl, CoreProfile, absent_is_none
from app.backends.endpoint import CLOSED, Endpoint, NotKnownThere, was_asked_to_stop
from app.backends.joining import join
from app.backends.port import (
    Discovery,
    EngineRefused,
    EngineSilent,
    Found,
    Order,
    Silence,
    StillRunning,
)
from app.backends.session_letters import stage_request
from app.backends.spelling import Malformed, text_of
from app.backends.streams import StreamLimits, no_way, order_stream
from app.backends.stubs import stub_of
from app.backends.telling import Trouble
from app.clock import Clock
from app.domain.capabilities import Capabilities
from app.domain.commands import AbortRequests, StartProfile
from app.domain.facts import EngineFacts
from app.domain.kinds import OperationKind
from app.domain.operation import JsonObject
from app.domain.transitions import Completed, Fact
from app.domain.weight_sessions import NcclTransfer, SessionStage
from app.rpc.openengine.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    kv_pb2,
    lifecycle_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

log = logging.getLogger(__name__)

_ENDED = frozenset(
    {
        admin_pb2.ADMIN_OPERATION_STATE_SUCCEEDED,
        admin_pb2.ADMIN_OPERATION_STATE_FAILED,
        admin_pb2.ADMIN_OPERATION_STATE_CANCELLED,
    }
)
_MOST_MODELS = 16
_DESCRIBE_TIMEOUT_S = 1.0
_DESCRIBE_AGAIN_S = 5.0
_DEFAULT_LIMITS = StreamLimits()


@dataclass(frozen=True, slots=True)
class _AdminProfile:
    """As the engine itself tells it."""

    profile: admin_pb2.AdminProfile
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Understood:
    """A profile as it came over the wire, and what it says."""

    said: bytes
    facts: EngineFacts
    capabilities: Capabilities


class OpenEngineBackend:
    """Implements `EngineBackend`. `admin` takes orders and ends requests, `control` is read. `core`
    speaks for an engine that has no admin service: its requests can be ended, and its adapters
    changed where it has such calls."""

    def __init__(
        self,
        admin: Endpoint,
        control: Endpoint,
        clock: Clock,
        *,
        core: CoreControl,
        limits: StreamLimits = _DEFAULT_LIMITS,
    ) -> None:
        self._admin = admin
        self._control = control
        self._clock = clock
        self._core = core
        self._limits = limits
        self._understood: _Understood | None = None
        self._described: tuple[str, JsonObject, tuple[JsonObject, ...]] | None = None
        self._describe_after = 0.0
        self._trouble = Trouble(log, f"engine at {admin.name}")

    async def discover(self, timeout_s: float) -> Discovery:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        read = await self._read_profile(timeout_s)
        profile = read.profile
        try:
            facts, capabilities = self._understand(profile)
        except Malformed as malformed:
            self._trouble.seen(logging.WARNING, f"its profile can't be read: {malformed}")
            raise EngineSilent(Silence.MALFORMED) from malformed
        self._trouble.over()
        troubles = (*read.troubles, *readings.troubles_of(profile))
        # Constant for the life of an engine process, unless that can be given another shape.
        reshapes = OperationKind.RECONFIGURE_SERVING in capabilities.operations
        shape = f"{capabilities.world_size} {capabilities.models}"
        administered = not isinstance(read, CoreProfile)
        life = f"{facts.instance_id} {facts.revision if reshapes else ''}"
        of = f"{life} {administered} {shape}"
        if self._described is None or self._described[0] != of:
            left_s = ends_at - loop.time()
            self._described = await self._describe(of, left_s, administered=administered)
        if self._described is None:
            return Discovery({}, (), capabilities, facts, (*troubles, "control_unreachable"))
        _, info, models = self._described
        return Discovery(info, models, capabilities, facts, troubles)

    def _understand(self, profile: admin_pb2.AdminProfile) -> tuple[EngineFacts, Capabilities]:
        """Raises Malformed. An engine with nothing to do says the same for hours, and to read it
        costs more than to hear it."""
        said, now = profile.SerializeToString(), self._clock.now()
        before = self._understood
        if before is not None and before.said == said:
            return replace(before.facts, observed_at=now), before.capabilities
        facts = readings.facts_of(profile, now)
        capabilities = _shared(readings.capabilities_of(profile))
        self._understood = _Understood(said, facts, capabilities)
        return facts, capabilities

    async def _read_profile(self, timeout_s: float) -> _AdminProfile | CoreProfile:
        """Raises EngineSilent."""
        ends_at = asyncio.get_running_loop().time() + timeout_s
        try:
            profile = await self._admin.read(_get_profile, timeout_s)
        except NotKnownThere as unknown:
            raise EngineSilent(Silence.MALFORMED) from unknown
        if profile is not None:
            return _AdminProfile(profile)
        return await self._core.profile(ends_at - asyncio.get_running_loop().time())

    async def _describe(
        self, of: str, left_s: float, *, administered: bool
    ) -> tuple[str, JsonObject, tuple[JsonObject, ...]] | None:
        """What is read once `of` a state in which it stays the same. None: it could not be read.
        It is not tried at each reading then: facts are not to wait for it."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._describe_after or left_s <= 0:
            return None
        timeout_s = min(left_s, _DESCRIBE_TIMEOUT_S)
        try:
            server = await self._control.read(_get_server_info, timeout_s)
            info = {**readings.info_of(server), "admin_service": administered}
            models: list[JsonObject] = []
            for name in server.supported_models[:_MOST_MODELS]:
                model = await self._control.read(partial(_get_model_info, name), timeout_s)
                models.append(readings.model_of(model))
        except (EngineSilent, NotKnownThere, Malformed):
            self._describe_after = loop.time() + _DESCRIBE_AGAIN_S
            return None
        return of, info, tuple(models)

    async def load(self, timeout_s: float) -> JsonObject:
        try:
            return readings.load_of(await self._control.read(_get_load, timeout_s))
        except (Malformed, NotKnownThere) as malformed:
            raise EngineSilent(Silence.MALFORMED) from malformed

    async def kv_event_sources(self, timeout_s: float) -> tuple[JsonObject, ...] | None:
        try:
            found = await self._control.read(_get_kv_event_sources, timeout_s)
            return None if found is None else readings.kv_sources_of(found)
        except (Malformed, NotKnownThere) as malformed:
            raise EngineSilent(Silence.MALFORMED) from malformed

    async def find(self, operation_id: str, timeout_s: float) -> Found | None:
        try:
            known = await self._admin.read(partial(_get_operation, operation_id), timeout_s)
        except NotKnownThere:
            return None
        if known is None:
            # Without an admin service there are no records; with one, something is in between.
            await self._core.profile(timeout_s)
            return None
        if known.idempotency_key != operation_id or not known.operation_id:
            raise EngineSilent(Silence.MALFORMED)
        try:
            end = letters.end_of(known)
        except Malformed:
            end = None
        return Found(
            engine_operation_id=text_of(known.operation_id),
            instance_id=text_of(known.instance_id),
            ended=known.state in _ENDED,
            end=end,
        )

    async def carry_out(self, order: Order) -> AsyncGenerator[Fact, None]:
        if isinstance(order.command, AbortRequests):
            send = await self._abort_call(order)
            facts = aborts.abort_requests(
                order.command, send, late=lambda: self._clock.now() >= order.deadline_at
            )
        elif isinstance(order.command, StartProfile):
            facts = profiles.profile_order(
                self._admin,
                order,
                order.command,
                self._record,
                self._limits,
                self._longest(order),
                self._clock.now,
            )
        elif adapters.is_adapter_order(order.command):
            facts = adapters.adapter_order(
                self._admin,
                order,
                self._profile,
                self._record,
                self._longest(order),
                self._clock.now,
            )
        else:
            facts = order_stream(self._admin, order, self.find, self._limits, self._clock.now)
        try:
            async for fact in facts:
                yield fact
        finally:
            await facts.aclose()

    def end_without_record(self, order: Order) -> Fact | None:
        if isinstance(order.command, AbortRequests):
            return aborts.all_unverified(order.command)
        return None

    async def read_back(
        self, order: Order, sent_to: str | None, timeout_s: float
    ) -> Completed | None:
        if not adapters.is_adapter_order(order.command):
            return None
        read = await self._read_profile(timeout_s)
        try:
            shown = adapters.read_back(order.command, read.profile, sent_to)
        except Malformed as malformed:
            raise EngineSilent(Silence.MALFORMED) from malformed
        if shown is None and isinstance(read, CoreProfile) and read.profile.instance_id == sent_to:
            # It does not tell what it is at: the order may take effect yet.
            raise StillRunning("the engine does not tell whether it is at it")
        return shown

    def _longest(self, order: Order) -> float:
        left_s = (order.deadline_at - self._clock.now()).total_seconds()
        return max(left_s, 0.0) + self._limits.settle_s

    async def _record(self, engine_operation_id: str, timeout_s: float) -> admin_pb2.AdminOperation:
        return await self._admin.read(partial(_get_record, engine_operation_id), timeout_s)

    async def _profile(self, timeout_s: float) -> admin_pb2.AdminProfile:
        return (await self._read_profile(timeout_s)).profile

    async def cancel(self, engine_operation_id: str, timeout_s: float) -> None:
        wanted = admin_pb2.CancelAdminOperationRequest(operation_id=engine_operation_id)
        channel, metadata = await self._admin.open()
        stub = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
        try:
            await stub.CancelOperation(wanted, timeout=timeout_s, metadata=metadata)
        except CLOSED as closed:
            if was_asked_to_stop(closed):
                raise
            raise EngineSilent(Silence.UNREACHABLE) from closed
        except grpc.aio.AioRpcError as error:
            silent = self._admin.failed(error)
            refusal = status_map.refusal_of(error)
            if refusal is not None:
                raise EngineRefused(refusal) from error
            raise silent from error

    async def stop_profile(self, engine_operation_id: str, key: str, timeout_s: float) -> None:
        await profiles.stop(self._admin, self._record, engine_operation_id, key, timeout_s)

    async def go_on(
        self, stage: SessionStage, key: str, expected_revision: int | None, timeout_s: float
    ) -> None:
        request = stage_request(stage, key, expected_revision)
        await take_further(self._admin, request, timeout_s)

    async def join_group(self, transfer: NcclTransfer, timeout_s: float) -> bool:
        return await join(self._admin, transfer, timeout_s)

    async def close(self) -> None:
        await self._admin.close()
        await self._control.close()

    async def _abort_call(self, order: Order) -> aborts.Send:
        """Through the admin listener, which serves all of `Control`: elsewhere a caller ends only
        requests of its own."""
        try:
            channel, metadata = await self._admin.open_for(order, self._clock.now)
        except EngineSilent as silent:
            raise EngineRefused(no_way(silent)) from silent
        stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
        left_s = (order.deadline_at - self._clock.now()).total_seconds()
        timeout_s = max(min(left_s, self._limits.abort_s), 0.001)

        async def send(request: lifecycle_pb2.AbortRequest) -> lifecycle_pb2.AbortResponse:
            try:
                return await stub.Abort(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                self._admin.failed(error)
                raise

        return send


def _shared(capabilities: Capabilities) -> Capabilities:
    """One object for all that are equal: engines of one make, of which a fleet has a thousand."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    return _known.setdefault(repr(capabilities), capabilities)


_MOST_KNOWN = 256
_known: dict[str, Capabilities] = {}


# ---- reads: the channel and the keyword arguments of the call come from the endpoint ----


async def _get_profile(channel: grpc.aio.Channel, rest: Any) -> admin_pb2.AdminProfile | None:
    stub = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    return await absent_is_none(stub.GetAdminProfile(admin_pb2.GetAdminProfileRequest(), **rest))


async def _get_operation(
    key: str, channel: grpc.aio.Channel, rest: Any
) -> admin_pb2.AdminOperation | None:
    stub = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    wanted = admin_pb2.GetAdminOperationRequest(idempotency_key=key)
    return await absent_is_none(stub.GetOperation(wanted, **rest))


async def _get_record(
    engine_operation_id: str, channel: grpc.aio.Channel, rest: Any
) -> admin_pb2.AdminOperation:
    stub = stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    wanted = admin_pb2.GetAdminOperationRequest(operation_id=engine_operation_id)
    return await stub.GetOperation(wanted, **rest)


async def _get_server_info(channel: grpc.aio.Channel, rest: Any) -> server_pb2.ServerInfo:
    stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
    return await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), **rest)


async def _get_model_info(name: str, channel: grpc.aio.Channel, rest: Any) -> model_pb2.ModelInfo:
    stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
    return await stub.GetModelInfo(model_pb2.GetModelInfoRequest(model=name), **rest)


async def _get_load(channel: grpc.aio.Channel, rest: Any) -> server_pb2.LoadInfo:
    stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
    return await stub.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True), **rest)


async def _get_kv_event_sources(
    channel: grpc.aio.Channel, rest: Any
) -> kv_pb2.GetKvEventSourcesResponse | None:
    stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
    return await absent_is_none(stub.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest(), **rest))
