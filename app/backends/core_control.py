"""An engine that speaks the core `Control` service and no `OpenEngineAdmin`: what can be said of it
in the words of a profile, so that everything behind that stays the same.

It has no revision. What is known of it is kept, and the revision rises with what a reading changes:
its adapters, or the process that answers. Other clients of such an engine are not fenced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from app.backends.endpoint import Endpoint, NotKnownThere
from app.backends.kept_states import KeptStates
from app.backends.port import EngineSilent, Silence
from app.backends.spelling import text_of
from app.backends.stubs import stub_of
from app.backends.telling import Trouble
from app.domain.errors import ChadburnError
from app.domain.kept_state import KeptState
from app.domain.operation import JsonObject, JsonValue
from app.rpc.openengine.v1 import (
    admin_pb2,
    lifecycle_pb2,
    lora_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_H = lifecycle_pb2.HealthState
_K = admin_pb2.AdminOperationKind
_TRIES = 3
# Such an engine refuses new requests as long as it drains.
_ADMISSION = {
    _H.HEALTH_STATE_READY: admin_pb2.ADMISSION_STATE_OPEN,
    _H.HEALTH_STATE_DEGRADED: admin_pb2.ADMISSION_STATE_OPEN,
    _H.HEALTH_STATE_DRAINING: admin_pb2.ADMISSION_STATE_DRAINING,
}
_TROUBLES = {
    _H.HEALTH_STATE_STARTING: "not_ready",
    _H.HEALTH_STATE_NOT_READY: "not_ready",
    _H.HEALTH_STATE_DEGRADED: "degraded",
}


@dataclass(frozen=True, slots=True)
class CoreProfile:
    """`troubles`: as of a `Discovery`."""

    profile: admin_pb2.AdminProfile
    troubles: tuple[str, ...]


class CoreControl:
    """`kept` None: nowhere, and the revision stays 0."""

    def __init__(self, control: Endpoint, engine_id: str, kept: KeptStates | None) -> None:
        self._control = control
        self._engine_id = engine_id
        self._kept = kept
        self._trouble = Trouble(log, f"engine {engine_id}")

    async def profile(self, timeout_s: float) -> CoreProfile:
        """Raises EngineSilent; also where the engine says that it has the admin service. Then what
        has answered for it is another listener, or something in between, and nothing is concluded.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._profile(timeout_s)
        except TimeoutError:
            raise EngineSilent(Silence.DEADLINE) from None
        except NotKnownThere as unknown:
            raise EngineSilent(Silence.MALFORMED) from unknown

    async def _profile(self, timeout_s: float) -> CoreProfile:
        server = await self._control.read(_get_server_info, timeout_s)
        if server.extra.fields["openengine_admin"].bool_value:
            self._trouble.seen(logging.WARNING, "its admin service is not at its address")
            raise EngineSilent(Silence.REFUSED)
        if not server.instance_id:
            # Its restarts could not be told, and orders would go to processes unseen.
            self._trouble.seen(logging.WARNING, "it does not say which process answers")
            raise EngineSilent(Silence.MALFORMED)
        health = await self._control.read(_get_health, timeout_s)
        loras = await self._control.read(_list_loras, timeout_s)
        adapters = () if loras is None else tuple(loras.adapters)
        state = _H.HEALTH_STATE_UNSPECIFIED if health is None else health.state
        profile = admin_pb2.AdminProfile(
            operations=[admin_pb2.OperationSupport(kind=kind) for kind in _offered(loras)],
            models=server.supported_models,
            world_size=_world_size(server.parallelism),
            instance_id=server.instance_id,
            revision=await self._revision(server.instance_id, adapters),
            revision_source=admin_pb2.REVISION_SOURCE_GATEWAY,
            state=admin_pb2.AdminState(
                admission=_ADMISSION.get(state, admin_pb2.ADMISSION_STATE_UNSPECIFIED),
                weights=_weights(state),
                role=server.engine_role,
                loras=adapters,
            ),
        )
        self._trouble.over()
        trouble = _TROUBLES.get(state)
        return CoreProfile(profile, () if trouble is None else (trouble,))

    async def _revision(self, instance_id: str, adapters: tuple[lora_pb2.LoraAdapter, ...]) -> int:
        if self._kept is None:
            return 0
        seen = _document(instance_id, adapters)
        try:
            for _ in range(_TRIES):
                before = await self._kept.get(self._engine_id)
                if before is not None and before.document == seen:
                    return before.revision
                after = KeptState(
                    number=1 if before is None else before.number + 1,
                    revision=0 if before is None else before.revision + 1,
                    pause_epoch=0 if before is None else before.pause_epoch,
                    release_epoch=0 if before is None else before.release_epoch,
                    document=seen,
                )
                if await self._kept.put(self._engine_id, after):
                    return after.revision
        except ChadburnError as error:
            self._trouble.seen(logging.WARNING, f"what is kept of it was not read: {error!r}")
        raise EngineSilent(Silence.DEADLINE)


def _document(instance_id: str, adapters: tuple[lora_pb2.LoraAdapter, ...]) -> JsonObject:
    loras: list[JsonValue] = [
        {
            "name": text_of(one.lora_name),
            "id": one.lora_id,
            "path": text_of(one.source_path, 4096),
        }
        for one in sorted(adapters, key=lambda one: (one.lora_name, one.lora_id, one.source_path))
    ]
    return {"control": {"instance_id": text_of(instance_id), "loras": loras}}


def _offered(loras: lora_pb2.ListLorasResponse | None) -> list[Any]:
    """Whether it takes abort cannot be asked without ending something: an order shows it."""
    if loras is None:
        return [_K.ADMIN_OPERATION_KIND_ABORT_REQUESTS]
    return [
        _K.ADMIN_OPERATION_KIND_ABORT_REQUESTS,
        _K.ADMIN_OPERATION_KIND_LOAD_LORA,
        _K.ADMIN_OPERATION_KIND_UNLOAD_LORA,
    ]


def _weights(state: int) -> admin_pb2.WeightsStatus:
    """Of an engine that serves nothing is known against them."""
    ready = state in _ADMISSION
    return admin_pb2.WeightsStatus(
        state=admin_pb2.WEIGHTS_STATE_VALID if ready else admin_pb2.WEIGHTS_STATE_UNKNOWN
    )


def _world_size(shape: server_pb2.ParallelismInfo) -> int:
    sizes = (shape.tensor_parallel_size, shape.pipeline_parallel_size, shape.data_parallel_size)
    found = 1
    for size in sizes:
        found *= max(size, 1)
    return found


# ---- reads ----


async def absent_is_none(call: Awaitable[T]) -> T | None:
    """None: there is no such call."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise


async def _get_server_info(channel: grpc.aio.Channel, rest: Any) -> server_pb2.ServerInfo:
    stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
    return await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), **rest)


async def _get_health(channel: grpc.aio.Channel, rest: Any) -> lifecycle_pb2.HealthResponse | None:
    stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
    return await absent_is_none(stub.Health(lifecycle_pb2.HealthRequest(), **rest))


async def _list_loras(channel: grpc.aio.Channel, rest: Any) -> lora_pb2.ListLorasResponse | None:
    stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
    return await absent_is_none(stub.ListLoras(lora_pb2.ListLorasRequest(), **rest))
