"""Orders as they come over the wire, read into commands; all that is malformed is refused here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from app.domain.capabilities import Capabilities
from app.domain.commands import (
    Command,
    FlushCaches,
    Pause,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    Resume,
    StartProfile,
)
from app.domain.errors import (
    FieldFault,
    InvalidArgument,
    MalformedIdempotencyKey,
    UnsupportedOperation,
)
from app.domain.idempotency import check_key
from app.domain.kinds import NewRequests, OperationKind, ReconfigurableField, ResourceKind
from app.enginekit.session_requests import goes_on, read_stage, refuse_sessions
from app.enginekit.sessions import ReadStage
from app.enginekit.vocabulary import (
    CACHE_KIND,
    CONTENT_POLICY,
    DRAIN_RULE,
    ENGINE_ROLE,
    NEW_REQUESTS,
    PAUSE_MODE,
    PROFILER_KIND,
    RESOURCE_KIND,
)
from app.enginekit.weight_requests import read_update
from app.rpc.openengine.v1 import admin_pb2

OrderRequest: TypeAlias = (
    admin_pb2.FlushCachesRequest
    | admin_pb2.PauseRequest
    | admin_pb2.ResumeRequest
    | admin_pb2.ReleaseResourcesRequest
    | admin_pb2.RestoreResourcesRequest
    | admin_pb2.UpdateWeightsRequest
    | admin_pb2.StartProfileRequest
    | admin_pb2.ReconfigureServingRequest
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOrder:
    """`model` as asked: None says nothing about it, or the whole engine (`whole_engine`)."""

    command: Command
    key: str
    fingerprint: str
    expected_revision: int | None
    deadline_ms: int | None
    whole_engine: bool


def read_offered(request: OrderRequest, can: Capabilities) -> ReadOrder | ReadStage:
    """Like `read_order`. What is malformed and not offered anyway is UnsupportedOperation."""
    try:
        return read_order(request)
    except InvalidArgument:
        kind = KIND_OF[type(request)]
        if kind not in can.operations:
            raise UnsupportedOperation(f"this engine does not offer {kind.value}") from None
        if isinstance(request, admin_pb2.UpdateWeightsRequest):
            refuse_sessions(request, can)
        raise


def read_order(request: OrderRequest) -> ReadOrder | ReadStage:
    """Raises InvalidArgument. Capabilities and state are looked at later."""
    refuse_unknown_fields(request)
    key = _key(request)
    if isinstance(request, admin_pb2.UpdateWeightsRequest) and goes_on(request):
        return ReadStage(
            command=read_stage(request),
            key=key,
            fingerprint=fingerprint(request),
            expected_revision=_expected_revision(request),
            model=_model(request),
        )
    deadline_ms = request.deadline_ms if request.HasField("deadline_ms") else None
    if deadline_ms == 0:
        raise _fault("/deadline_ms", "must be above 0 ms")
    return ReadOrder(
        command=_READERS[type(request)](request),
        key=key,
        fingerprint=fingerprint(request),
        expected_revision=_expected_revision(request),
        deadline_ms=deadline_ms,
        whole_engine=request.WhichOneof("target") == "whole_engine",
    )


def read_stop(request: admin_pb2.StopProfileRequest) -> str:
    """The id of the profile. Raises InvalidArgument."""
    refuse_unknown_fields(request)
    _key(request)
    _model(request)
    if not request.profile_id:
        raise _fault("/profile_id", "must be set")
    return request.profile_id


def check_target(order: ReadOrder, can: Capabilities) -> None:
    """An engine of several models is told which is meant. Raises InvalidArgument,
    UnsupportedOperation."""
    if len(can.models) < 2 or order.whole_engine:
        return
    if order.command.model is None:
        raise _fault("/model", "several models are served: name one, or say whole_engine")
    if not isinstance(order.command, FlushCaches):
        # One gate stands in front of the engine, not one in front of each model.
        raise UnsupportedOperation("this is done to the engine as a whole: whole_engine")


def check_deadline(order: ReadOrder, can: Capabilities) -> int:
    """The deadline that holds, in milliseconds. Raises InvalidArgument."""
    if order.deadline_ms is None:
        return can.limits.default_deadline_ms
    if order.deadline_ms > can.limits.max_deadline_ms:
        raise _fault(
            "/deadline_ms",
            f"the longest deadline of this engine is {can.limits.max_deadline_ms} ms",
        )
    return order.deadline_ms


def fingerprint(request: Message) -> str:
    """Hex SHA-256 of all that was asked, the key excepted."""
    asked = type(request)()
    asked.CopyFrom(request)
    asked.ClearField("idempotency_key")
    name = request.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(name + b"\0" + asked.SerializeToString(deterministic=True)).hexdigest()


def refuse_unknown_fields(message: Message) -> None:
    """An order with a part that this engine does not know can't be carried out as it was asked:
    leaving the part out might turn it into something else. Raises InvalidArgument."""
    if len(UnknownFieldSet(message)):
        raise InvalidArgument("the request has a field that this engine does not know")
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            parts = value if field.is_repeated else (value,)
            for part in parts:
                refuse_unknown_fields(part)


def _key(request: OrderRequest | admin_pb2.StopProfileRequest) -> str:
    try:
        return check_key(request.idempotency_key)
    except MalformedIdempotencyKey as malformed:
        fault = FieldFault("/idempotency_key", "must be 1 to 128 printable ASCII characters")
        raise MalformedIdempotencyKey(malformed.message, faults=(fault,)) from None


def _expected_revision(request: OrderRequest) -> int | None:
    return request.expected_revision if request.HasField("expected_revision") else None


def _model(request: OrderRequest | admin_pb2.StopProfileRequest) -> str | None:
    if request.WhichOneof("target") != "model":
        return None
    if not request.model:
        raise _fault("/model", "must not be empty")
    return request.model


def _flush(request: admin_pb2.FlushCachesRequest) -> Command:
    caches = tuple(
        CACHE_KIND.read(number, f"/caches/{index}") for index, number in enumerate(request.caches)
    )
    return FlushCaches(model=_model(request), caches=caches)


def _pause(request: admin_pb2.PauseRequest) -> Command:
    new_requests = NewRequests.HOLD
    if request.HasField("new_requests"):
        new_requests = NEW_REQUESTS.read(request.new_requests, "/new_requests")
    return Pause(
        model=_model(request),
        mode=PAUSE_MODE.read(request.mode, "/mode"),
        new_requests=new_requests,
        hold_limit_ms=request.hold_limit_ms if request.HasField("hold_limit_ms") else None,
    )


def _resume(request: admin_pb2.ResumeRequest) -> Command:
    return Resume(model=_model(request), pause_epoch=request.pause_epoch)


def _resources(numbers: Iterable[int]) -> tuple[ResourceKind, ...]:
    return tuple(
        RESOURCE_KIND.read(number, f"/resources/{index}") for index, number in enumerate(numbers)
    )


def _release(request: admin_pb2.ReleaseResourcesRequest) -> Command:
    return ReleaseResources(
        model=_model(request),
        resources=_resources(request.resources),
        content=CONTENT_POLICY.read(request.content, "/content"),
        drain=DRAIN_RULE.read(request.drain, "/drain"),
    )


def _update(request: admin_pb2.UpdateWeightsRequest) -> Command:
    return read_update(request, _model(request))


def _restore(request: admin_pb2.RestoreResourcesRequest) -> Command:
    return RestoreResources(
        model=_model(request),
        resources=_resources(request.resources),
        release_epoch=request.release_epoch,
    )


def _start_profile(request: admin_pb2.StartProfileRequest) -> Command:
    return StartProfile(
        model=_model(request),
        profiler=PROFILER_KIND.read(request.kind, "/kind"),
        steps=request.steps if request.HasField("steps") else None,
        duration_ms=request.duration_ms if request.HasField("duration_ms") else None,
        record_shapes=request.record_shapes,
        with_stack=request.with_stack,
    )


_SIZES = frozenset(field.value for field in ReconfigurableField) - {ReconfigurableField.ROLE.value}


def _reconfigure(request: admin_pb2.ReconfigureServingRequest) -> Command:
    role = ENGINE_ROLE.read(request.role, "/role") if request.HasField("role") else None
    sizes = {field.name: value for field, value in request.ListFields() if field.name in _SIZES}
    return ReconfigureServing(
        model=_model(request), role=role, drain=DRAIN_RULE.read(request.drain, "/drain"), **sizes
    )


_READERS: Mapping[type[Message], Callable[[Any], Command]] = {
    admin_pb2.FlushCachesRequest: _flush,
    admin_pb2.PauseRequest: _pause,
    admin_pb2.ResumeRequest: _resume,
    admin_pb2.ReleaseResourcesRequest: _release,
    admin_pb2.RestoreResourcesRequest: _restore,
    admin_pb2.UpdateWeightsRequest: _update,
    admin_pb2.StartProfileRequest: _start_profile,
    admin_pb2.ReconfigureServingRequest: _reconfigure,
}


KIND_OF: Mapping[type[Message], OperationKind] = {
    admin_pb2.FlushCachesRequest: OperationKind.FLUSH_CACHES,
    admin_pb2.PauseRequest: OperationKind.PAUSE,
    admin_pb2.ResumeRequest: OperationKind.RESUME,
    admin_pb2.ReleaseResourcesRequest: OperationKind.RELEASE_RESOURCES,
    admin_pb2.RestoreResourcesRequest: OperationKind.RESTORE_RESOURCES,
    admin_pb2.UpdateWeightsRequest: OperationKind.UPDATE_WEIGHTS,
    admin_pb2.StartProfileRequest: OperationKind.PROFILE,
    admin_pb2.ReconfigureServingRequest: OperationKind.RECONFIGURE_SERVING,
}


def _fault(pointer: str, detail: str) -> InvalidArgument:
    return InvalidArgument(
        f"{pointer.removeprefix('/')} {detail}", faults=(FieldFault(pointer, detail),)
    )
