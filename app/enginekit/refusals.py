"""Refusals as gRPC statuses: code, google.rpc.ErrorInfo, BadRequest and RetryInfo."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from app.auth.tokens.errors import PermissionDenied, TokenRefused
from app.domain.errors import (
    Aborted,
    AlreadyExists,
    ChadburnError,
    ChunkOutOfOrder,
    DeadlineExceeded,
    EngineBusy,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RevisionMismatch,
    StalePauseEpoch,
    StaleReleaseEpoch,
    Unavailable,
    Unimplemented,
)
from app.domain.operation import Operation
from app.enginekit.runtime import RequestRefused, RuntimeFault
from app.rpc.openengine.v1 import error_pb2

log = logging.getLogger(__name__)

DOMAIN = "chadburn"

# ---- leaves that only an engine's own listeners know ----


class WrongListener(PermissionDenied):
    """The token is genuine, and made for the engine's other listener."""

    reason = "WRONG_AUDIENCE"


class AdminListenerOnly(PermissionDenied):
    reason = "ADMIN_LISTENER_ONLY"


class AdmissionClosed(Unavailable):
    """Reasons of this kind are the names of `openengine.v1.ErrorCode`."""

    reason = "DRAINING"


class TooManyHeld(ResourceExhausted):
    reason = "OVERLOADED"


class DuplicateRequest(AlreadyExists):
    reason = "DUPLICATE_REQUEST"


class UnknownRequest(NotFound):
    reason = "REQUEST_NOT_FOUND"


class UnknownKvSession(NotFound):
    reason = "KV_SESSION_NOT_FOUND"


class UnknownModel(NotFound):
    reason = "MODEL_NOT_FOUND"


class RoleMismatch(FailedPrecondition):
    reason = "ROLE_MISMATCH"


class UnsupportedFeature(Unimplemented):
    reason = "UNSUPPORTED_FEATURE"


class OutOfService(Unavailable):
    """Weights are not valid, or the ranks disagree: nothing is served until that is mended."""

    reason = "OUT_OF_SERVICE"
    retryable = False


class EngineNotAnswering(Unavailable):
    reason = "ENGINE_NOT_ANSWERING"


class StoreUnavailable(Unavailable):
    """The operation store cannot be written, so no order can be taken on."""

    reason = "STORE_UNAVAILABLE"


class Stopping(Unavailable):
    reason = "ENGINE_STOPPING"


# ---- to the wire ----

_CODES: tuple[tuple[type[ChadburnError], int], ...] = (
    (InvalidArgument, code_pb2.INVALID_ARGUMENT),
    (NotFound, code_pb2.NOT_FOUND),
    (AlreadyExists, code_pb2.ALREADY_EXISTS),
    (Aborted, code_pb2.ABORTED),
    (FailedPrecondition, code_pb2.FAILED_PRECONDITION),
    (ResourceExhausted, code_pb2.RESOURCE_EXHAUSTED),
    (Unimplemented, code_pb2.UNIMPLEMENTED),
    (Unavailable, code_pb2.UNAVAILABLE),
    (DeadlineExceeded, code_pb2.DEADLINE_EXCEEDED),
    (TokenRefused, code_pb2.UNAUTHENTICATED),
    (PermissionDenied, code_pb2.PERMISSION_DENIED),
)

_E = error_pb2.ErrorCode
_CODE_OF_REFUSAL: Mapping[int, int] = {
    _E.ERROR_CODE_INVALID_ARGUMENT: code_pb2.INVALID_ARGUMENT,
    _E.ERROR_CODE_UNSUPPORTED_FEATURE: code_pb2.UNIMPLEMENTED,
    _E.ERROR_CODE_ROLE_MISMATCH: code_pb2.FAILED_PRECONDITION,
    _E.ERROR_CODE_MODEL_NOT_FOUND: code_pb2.NOT_FOUND,
    _E.ERROR_CODE_OVERLOADED: code_pb2.RESOURCE_EXHAUSTED,
    _E.ERROR_CODE_REQUEST_NOT_FOUND: code_pb2.NOT_FOUND,
    _E.ERROR_CODE_DUPLICATE_REQUEST: code_pb2.ALREADY_EXISTS,
    _E.ERROR_CODE_KV_SESSION_NOT_FOUND: code_pb2.NOT_FOUND,
    _E.ERROR_CODE_KV_TRANSFER_FAILED: code_pb2.UNAVAILABLE,
    _E.ERROR_CODE_CANCELLED: code_pb2.CANCELLED,
    _E.ERROR_CODE_DRAINING: code_pb2.UNAVAILABLE,
}


class Internal(ChadburnError):
    """A fault of the engine's own; the log has the rest."""

    def __init__(self) -> None:
        super().__init__("the engine could not answer")


def status_of(error: ChadburnError) -> status_pb2.Status:
    """The status a caller gets. Anything outside the known branches is INTERNAL."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), code_pb2.INTERNAL)
    details: list[Any] = [_info(error.reason, error.retryable, _metadata(error))]
    if error.faults:
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=field_path(fault.pointer), description=fault.detail
                    )
                    for fault in error.faults
                ]
            )
        )
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration(seconds=error.retry_after_s)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return _packed(code, error.message, details)


def status_of_refusal(refused: RequestRefused) -> status_pb2.Status:
    """A request the runtime will not serve; the reason is the name of its ErrorCode. There is none
    for an engine that lost its ranks and has them back soon, but the status says it."""
    unknown = code_pb2.UNAVAILABLE if refused.retryable else code_pb2.INTERNAL
    code = _CODE_OF_REFUSAL.get(refused.code, unknown)
    reason = "INTERNAL"
    if refused.code in _CODE_OF_REFUSAL:
        reason = _E.Name(_E.ValueType(refused.code)).removeprefix("ERROR_CODE_")
    return _packed(code, refused.message, [_info(reason, refused.retryable, {})])


class OrderDidNotSucceed(Exception):
    """For calls that answer with an order's outcome and know no events."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation.id)
        self.operation = operation


def status_of_end(operation: Operation) -> status_pb2.Status:
    """The failure, or the cancellation, of an operation that has ended without success."""
    told = {"operation_id": operation.id}
    error = operation.error
    if error is None:
        return _packed(code_pb2.ABORTED, "cancelled", [_info("CANCELLED", False, told)])
    told |= {
        "ranks": ",".join(str(rank) for rank in error.ranks),
        "effect": error.effect.value,
    }
    code = code_pb2.Code.Value(error.code)
    return _packed(code, error.message, [_info(error.reason, error.retryable, told)])


def status_of_fault(fault: RuntimeFault) -> status_pb2.Status:
    """A read that the engine could not answer, in its own words."""
    code = code_pb2.Code.Value(fault.code)
    return _packed(code, fault.message, [_info(fault.reason, fault.retryable, {})])


def field_path(pointer: str) -> str:
    """`/caches/0` to `caches[0]`: the path of a field in a message, as BadRequest names it. The
    source of weights is a oneof, whose name is no part of a path."""
    inside = re.sub(r"^/source(?=/)", "", pointer)
    return re.sub(r"\.(\d+)", r"[\1]", inside.removeprefix("/").replace("/", "."))


def _metadata(error: ChadburnError) -> dict[str, str]:
    """Numbers and ids a client can act on, as strings. The keys are part of the contract."""
    told: dict[str, str] = {}
    if error.operation_id is not None:
        told["operation_id"] = error.operation_id
    if isinstance(error, RevisionMismatch):
        told |= {
            "expected_revision": str(error.expected),
            "current_revision": str(error.current),
        }
    if isinstance(error, StalePauseEpoch):
        told |= {
            "given_pause_epoch": str(error.given),
            "current_pause_epoch": str(error.current),
        }
    if isinstance(error, StaleReleaseEpoch):
        told |= {
            "given_release_epoch": str(error.given),
            "current_release_epoch": str(error.current),
        }
    if isinstance(error, ChunkOutOfOrder):
        told |= {"given_index": str(error.given), "expected_index": str(error.expected)}
    if isinstance(error, EngineBusy) and isinstance(error, NamedBusy):
        told["idempotency_key"] = error.idempotency_key
    return told


class NamedBusy(EngineBusy):
    """Also tells the key of the operation in the way: whoever ordered it knows it by that."""

    def __init__(self, *, operation_id: str, idempotency_key: str) -> None:
        super().__init__(operation_id=operation_id)
        self.idempotency_key = idempotency_key


def _info(reason: str, retryable: bool, metadata: dict[str, str]) -> error_details_pb2.ErrorInfo:
    told = {**metadata, "retryable": "true" if retryable else "false"}
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=told)


def _packed(code: int, message: str, details: list[Any]) -> status_pb2.Status:
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return status_pb2.Status(code=code, message=message, details=packed)


async def abort_with(context: Any, status: status_pb2.Status) -> None:
    """End the RPC with that status; does not return."""
    await context.abort_with_status(rpc_status.to_status(status))


@asynccontextmanager
async def answering(context: Any) -> AsyncIterator[None]:
    """Around a handler: what it raises becomes a status, and never the text of a bug."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except ChadburnError as refused:
        await abort_with(context, status_of(refused))
    except RequestRefused as refused:
        await abort_with(context, status_of_refusal(refused))
    except OrderDidNotSucceed as ended:
        await abort_with(context, status_of_end(ended.operation))
    except RuntimeFault as fault:
        await abort_with(context, status_of_fault(fault))
    except Exception:
        log.exception("a handler failed")
        await abort_with(context, status_of(Internal()))
