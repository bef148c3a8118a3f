"""Adapters, through the core Control service: calls that know no keys and are kept no record of.

What is there of an adapter can be read, so a lost reply is made good by looking: whether the engine
is still at it, and whether the adapter is there.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import datetime
from typing import TypeAlias

import grpc

from app.backends import letters, status_map
from app.backends.endpoint import CLOSED, Endpoint, NotKnownThere, was_asked_to_stop
from app.backends.port import EngineRefused, EngineSilent, Order, OutcomeLost, StillRunning
from app.backends.spelling import Malformed, count_of, text_of, value_of
from app.backends.streams import no_way
from app.backends.stubs import stub_of
from app.domain.commands import Command, LoadLora, UnloadLora
from app.domain.kinds import FailureEffect, OperationKind, Verification
from app.domain.operation import JsonObject, JsonValue, OperationError, OperationWarning
from app.domain.transitions import Cancelled, Completed, Fact, Failed, Warned
from app.rpc.openengine.v1 import admin_pb2, lora_pb2, openengine_pb2_grpc

log = logging.getLogger(__name__)

AdapterOrder: TypeAlias = LoadLora | UnloadLora
ReadProfile: TypeAlias = Callable[[float], Awaitable[admin_pb2.AdminProfile]]
"""Within so many seconds. Raises EngineSilent."""
ReadRecord: TypeAlias = Callable[[str, float], Awaitable[admin_pb2.AdminOperation]]
"""Of an operation id of the engine's, within so many seconds. Raises EngineSilent."""

_READ_S = 2.0


def is_adapter_order(command: Command) -> bool:
    return isinstance(command, LoadLora | UnloadLora)


async def adapter_order(
    endpoint: Endpoint,
    order: Order,
    read: ReadProfile,
    record: ReadRecord,
    timeout_s: float,
    now: Callable[[], datetime],
) -> AsyncGenerator[Fact, None]:
    """The end, and before it what else has changed. Raises what `EngineBackend.carry_out` does."""
    before = await _names_before(order, read)
    try:
        channel, metadata = await endpoint.open_for(order, now)
    except EngineSilent as silent:
        raise EngineRefused(no_way(silent)) from silent
    stub = stub_of(openengine_pb2_grpc.ControlStub, channel)
    try:
        result = await _call(stub, order.command, timeout_s, metadata)
    except CLOSED as closed:
        if was_asked_to_stop(closed):
            raise
        raise OutcomeLost("the connection to the engine was closed") from closed
    except grpc.aio.AioRpcError as error:
        endpoint.failed(error)
        failure = status_map.failure_of(error)
        if failure is None:
            refusal = status_map.refusal_of(error)
            if refusal is not None:
                raise EngineRefused(refusal) from error
            raise OutcomeLost(status_map.lost_because(error)) from error
        yield await _told_in_full(error, failure, record)
        return
    end, after = await _verified(order.command, result, read)
    for name in sorted(before - after if after is not None else ()):
        if name != getattr(order.command, "name", None):
            said = f"the adapter {name} is no longer loaded"
            yield Warned(warning=OperationWarning("LORA_EVICTED", said))
    yield end


async def _names_before(order: Order, read: ReadProfile) -> frozenset[str]:
    """What is loaded: a reply has no room for what a load has evicted. Nor has the call any for the
    expected revision, so it is looked at here, as late as possible."""
    try:
        profile = await read(_READ_S)
    except EngineSilent as silent:
        if order.expected_revision is None:
            return frozenset()
        raise EngineRefused(no_way(silent)) from silent
    if order.expected_revision is None:
        return _names(profile)
    if profile.revision != order.expected_revision:
        raise EngineRefused(
            OperationError(
                code="ABORTED",
                reason="REVISION_MISMATCH",
                message="the engine is at another revision than the expected one",
                effect=FailureEffect.NONE,
            )
        )
    return _names(profile)


def _names(profile: admin_pb2.AdminProfile) -> frozenset[str]:
    return frozenset(text_of(lora.lora_name) for lora in profile.state.loras)


async def _told_in_full(
    error: grpc.aio.AioRpcError, failure: OperationError, record: ReadRecord
) -> Fact:
    """As the engine's own record of the operation tells it, where that can be had: it says what was
    wrong, which a status may only hint at."""
    info = status_map.error_info(error)
    operation_id = "" if info is None else text_of(info.metadata.get("operation_id", ""))
    if operation_id:
        try:
            end = letters.end_of(await record(operation_id, _READ_S))
        except (EngineSilent, NotKnownThere, Malformed) as unread:
            log.info("the record of an adapter order was not read: %s", unread)
        else:
            if isinstance(end, Failed | Cancelled):
                return end
    return Failed(error=failure)


async def _call(
    stub: openengine_pb2_grpc.ControlStub,
    command: Command,
    timeout_s: float,
    metadata: tuple[tuple[str, str], ...],
) -> JsonObject:
    if isinstance(command, LoadLora):
        wanted = lora_pb2.LoraAdapter(
            lora_id=command.id, lora_name=command.name, source_path=command.path
        )
        request = lora_pb2.LoadLoraRequest(adapter=wanted)
        loaded = await stub.LoadLora(request, timeout=timeout_s, metadata=metadata)
        return {"changed": not loaded.already_loaded, "lora": _lora(loaded.adapter)}
    assert isinstance(command, UnloadLora)
    gone = await stub.UnloadLora(
        lora_pb2.UnloadLoraRequest(lora_name=command.name), timeout=timeout_s, metadata=metadata
    )
    return {"changed": True, "lora": _lora(gone.adapter)}


async def _verified(
    command: Command, result: JsonObject, read: ReadProfile
) -> tuple[Completed, frozenset[str] | None]:
    """The engine has said that it is done; verified if that can be seen. And what is loaded now,
    None: that could not be read."""
    try:
        profile = await read(_READ_S)
        seen = _shown(command, profile)
        revision = count_of(profile.revision)
    except (EngineSilent, Malformed) as unread:
        log.info("adapters were not read again: %s", unread)
        return Completed(result=result, verification=Verification.UNVERIFIED), None
    verification = Verification.VERIFIED if seen else Verification.UNVERIFIED
    end = Completed(result=result, revision=revision if seen else None, verification=verification)
    return end, _names(profile)


def read_back(
    command: Command, profile: admin_pb2.AdminProfile, sent_to: str | None
) -> Completed | None:
    """How it ended, as far as the engine's state shows. `changed` is then not known (null). None:
    it shows that the order has not taken effect in the process it was sent to, or it is another
    process. Raises StillRunning, Malformed."""
    if sent_to is None or text_of(profile.instance_id) != sent_to:
        return None
    for known in profile.state.open_operations:
        kind = value_of(admin_pb2.AdminOperationKind, known.kind, OperationKind)
        if kind is command.kind:
            raise StillRunning("the engine is at it")
    seen = _shown(command, profile)
    if seen is None:
        return None
    return Completed(result={"changed": None, **seen}, revision=count_of(profile.revision))


def _shown(command: Command, profile: admin_pb2.AdminProfile) -> JsonObject | None:
    """The state that was ordered; None: it is another."""
    for lora in profile.state.loras:
        if lora.lora_name != getattr(command, "name", None):
            continue
        if isinstance(command, UnloadLora):
            return None
        assert isinstance(command, LoadLora)
        same = lora.source_path == command.path and command.id in (0, lora.lora_id)
        return {"lora": _lora(lora)} if same else None
    return {"lora": None} if isinstance(command, UnloadLora) else None


def _lora(lora: lora_pb2.LoraAdapter) -> dict[str, JsonValue]:
    return {
        "name": text_of(lora.lora_name),
        "id": lora.lora_id,
        "path": text_of(lora.source_path, 4096),
    }
