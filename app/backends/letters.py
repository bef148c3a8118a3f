"""Orders on their way to an engine, and its events on their way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from google.rpc import code_pb2

from app.backends.port import Order
from app.backends.results import result_of
from app.backends.spelling import Malformed, count_of, number_of, reason_of, text_of, value_of
from app.backends.weight_letters import update_request
from app.domain.commands import (
    FlushCaches,
    Pause,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    Resume,
    UpdateWeights,
)
from app.domain.kinds import FailureEffect, OperationKind, Verification
from app.domain.operation import OperationError, OperationWarning, Progress
from app.domain.ranks import RankReport, RankState
from app.domain.transitions import (
    Cancelled,
    Completed,
    EngineAccepted,
    Fact,
    Failed,
    Progressed,
    RankReported,
    Warned,
)
from app.rpc.openengine.v1 import admin_pb2, server_pb2

Request = (
    admin_pb2.FlushCachesRequest
    | admin_pb2.PauseRequest
    | admin_pb2.ResumeRequest
    | admin_pb2.ReleaseResourcesRequest
    | admin_pb2.RestoreResourcesRequest
    | admin_pb2.UpdateWeightsRequest
    | admin_pb2.ReconfigureServingRequest
)


def request_of(order: Order) -> Request:
    """Every field that the command has reaches the message: an order that loses one on the way
    is another order. TypeError: a command that is not sent by a streamed RPC of this service."""
    command = order.command
    request: Request
    match command:
        case FlushCaches():
            request = admin_pb2.FlushCachesRequest(
                caches=[number_of(admin_pb2.CacheKind, cache) for cache in command.caches]
            )
        case Pause():
            request = admin_pb2.PauseRequest(
                mode=number_of(admin_pb2.PauseMode, command.mode),
                new_requests=number_of(admin_pb2.NewRequests, command.new_requests),
                hold_limit_ms=command.hold_limit_ms,
            )
        case Resume():
            request = admin_pb2.ResumeRequest(pause_epoch=command.pause_epoch)
        case ReleaseResources():
            request = admin_pb2.ReleaseResourcesRequest(
                resources=[number_of(admin_pb2.ResourceKind, kind) for kind in command.resources],
                content=number_of(admin_pb2.ContentPolicy, command.content),
                drain=number_of(admin_pb2.DrainRule, command.drain),
            )
        case RestoreResources():
            request = admin_pb2.RestoreResourcesRequest(
                resources=[number_of(admin_pb2.ResourceKind, kind) for kind in command.resources],
                release_epoch=command.release_epoch,
            )
        case UpdateWeights():
            request = update_request(command)
        case ReconfigureServing():
            role = command.role
            request = admin_pb2.ReconfigureServingRequest(
                role=None if role is None else number_of(server_pb2.EngineRole, role),
                tensor_parallel_size=command.tensor_parallel_size,
                data_parallel_size=command.data_parallel_size,
                max_running_requests=command.max_running_requests,
                max_batched_tokens=command.max_batched_tokens,
                drain=number_of(admin_pb2.DrainRule, command.drain),
            )
        case _:
            raise TypeError(f"{command.kind.value} is not sent this way")
    address(request, order)
    return request


def address(request: Request | admin_pb2.StartProfileRequest, order: Order) -> None:
    """Which order it is, and for which model."""
    request.idempotency_key = order.operation_id
    request.deadline_ms = order.deadline_ms
    if order.expected_revision is not None:
        request.expected_revision = order.expected_revision
    if order.command.model is None:
        request.whole_engine.SetInParent()
    else:
        request.model = order.command.model


def fact_of(event: admin_pb2.AdminOperationEvent, kind: OperationKind) -> Fact:
    """`kind`: what was ordered. Raises Malformed for an event that says nothing, or that has no
    number."""
    sequence = count_of(event.sequence)
    said = event.WhichOneof("event")
    if sequence == 0 or said is None or not event.operation_id:
        raise Malformed("an event without number, operation or content")
    if said == "completed":
        return _completed(event, sequence, kind)
    return _READERS[said](event, sequence)


def end_of(operation: admin_pb2.AdminOperation) -> Completed | Failed | Cancelled | None:
    """The end that the engine's record of an operation holds. Raises Malformed."""
    said = operation.WhichOneof("outcome")
    if said is None:
        return None
    event = admin_pb2.AdminOperationEvent(operation_id=operation.operation_id, sequence=1)
    getattr(event, said).CopyFrom(getattr(operation, said))
    kind = value_of(admin_pb2.AdminOperationKind, operation.kind, OperationKind)
    if kind is None:
        raise Malformed("an operation of no kind")
    end = fact_of(event, kind)
    assert isinstance(end, Completed | Failed | Cancelled)
    return replace(end, engine_sequence=None)


def _accepted(event: admin_pb2.AdminOperationEvent, sequence: int) -> Fact:
    return EngineAccepted(
        engine_sequence=sequence,
        engine_operation_id=text_of(event.operation_id),
        instance_id=text_of(event.accepted.instance_id) or None,
    )


def _progress(event: admin_pb2.AdminOperationEvent, sequence: int) -> Fact:
    said = event.progress
    progress = Progress(
        phase=text_of(said.phase, 64),
        done=count_of(said.done),
        total=count_of(said.total),
        unit=text_of(said.unit, 64),
    )
    return Progressed(engine_sequence=sequence, progress=progress)


def _rank(event: admin_pb2.AdminOperationEvent, sequence: int) -> Fact:
    said = event.rank
    state = value_of(admin_pb2.RankState, said.state, RankState) or RankState.UNKNOWN
    report = RankReport(rank=said.rank, state=state, message=text_of(said.message))
    return RankReported(engine_sequence=sequence, report=report)


def _warning(event: admin_pb2.AdminOperationEvent, sequence: int) -> Fact:
    said = event.warning
    warning = OperationWarning(reason_of(said.reason) or "UNSPECIFIED", text_of(said.message))
    return Warned(engine_sequence=sequence, warning=warning)


def _completed(event: admin_pb2.AdminOperationEvent, sequence: int, kind: OperationKind) -> Fact:
    said = event.completed
    verified = value_of(admin_pb2.Verification, said.verification, Verification)
    result = result_of(said, kind)
    if result is None:
        # It says that it is done, and not in a way that can be read: no more is claimed.
        verified = Verification.UNVERIFIED
    return Completed(
        engine_sequence=sequence,
        result={"changed": said.changed, **(result or {})},
        revision=count_of(said.revision),
        verification=verified or Verification.UNVERIFIED,
    )


def _failed(event: admin_pb2.AdminOperationEvent, sequence: int) -> Fact:
    said = event.failed
    # OK and what is no code at all would make a failure look like none.
    known = said.code != code_pb2.OK and said.code in code_pb2.Code.values()
    error = OperationError(
        code=code_pb2.Code.Name(said.code) if known else "UNKNOWN",
        reason=reason_of(said.reason) or "UNSPECIFIED",
        message=text_of(said.message) or "the engine gave no reason",
        retryable=said.retryable,
        ranks=tuple(said.ranks),
        effect=value_of(admin_pb2.FailureEffect, said.effect, FailureEffect)
        or FailureEffect.UNKNOWN,
    )
    return Failed(engine_sequence=sequence, error=error, revision=count_of(said.revision))


def _cancelled(event: admin_pb2.AdminOperationEvent, sequence: int) -> Fact:
    said = event.cancelled
    message = text_of(said.message) or "cancelled by the engine"
    return Cancelled(engine_sequence=sequence, message=message, revision=count_of(said.revision))


_READERS: Mapping[str, Callable[[admin_pb2.AdminOperationEvent, int], Fact]] = {
    "accepted": _accepted,
    "progress": _progress,
    "rank": _rank,
    "warning": _warning,
    "failed": _failed,
    "cancelled": _cancelled,
}
