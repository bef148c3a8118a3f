"""From gRPC status and google.rpc.ErrorInfo to what the domain knows. The only file that reads
either, so that no text of the transport's or the engine's reaches a caller through a status."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from app.backends.port import EngineSilent, Silence
from app.backends.spelling import reason_of, text_of
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError

_C = grpc.StatusCode

# With one of these the engine has judged the order and not taken it on.
_REFUSALS = frozenset(
    {
        _C.INVALID_ARGUMENT,
        _C.NOT_FOUND,
        _C.ALREADY_EXISTS,
        _C.ABORTED,
        _C.FAILED_PRECONDITION,
        _C.OUT_OF_RANGE,
        _C.UNIMPLEMENTED,
        _C.RESOURCE_EXHAUSTED,
        _C.UNAUTHENTICATED,
        _C.PERMISSION_DENIED,
    }
)
_AUTH = frozenset({_C.UNAUTHENTICATED, _C.PERMISSION_DENIED})

_SAID = {
    "ENGINE_AUTH_REFUSED": "the engine refused the gateway's credential",
    "REVISION_MISMATCH": "the engine is at another revision than the expected one",
    "ENGINE_BUSY": "another operation is running at the engine",
    "STALE_PAUSE_EPOCH": "that pause is not the engine's latest",
    "NOT_PAUSED": "the engine is not paused",
    "DRAIN_RUNNING": "a drain is running at the engine",
    "RESOURCES_RELEASED": "resources of the engine are released",
    "PROFILE_RUNNING": "a profile is being recorded or written at the engine: stop it, or wait",
    "PROFILING_REFUSED": "what would be profiled is being released or rebuilt at the engine",
    "WEIGHTS_NOT_VALID": "the engine's weights are not valid: a full update is the way back",
    "UNSUPPORTED_OPERATION": "the engine does not offer this",
    "NOT_CANCELLABLE": "the engine does not cancel this",
    "OPERATION_ENDED": "the operation has ended at the engine",
    "SESSION_NOT_FOUND": "the engine has no such weight session open",
    "SESSION_CLOSED": "the weight session takes nothing more at the engine",
    "CHUNK_OUT_OF_ORDER": "the engine expects another chunk",
    "TOO_MANY_CHUNKS": "too many chunks wait at the engine",
    "IDEMPOTENCY_KEY_REUSED": "the engine has another order under this key",
}
_SAID_BY_CODE = {
    _C.INVALID_ARGUMENT: "the engine found the order malformed",
    _C.NOT_FOUND: "the engine does not know what the order names",
    _C.ALREADY_EXISTS: "the engine has another order under this key",
    _C.ABORTED: "the engine is in another state than the order expects",
    _C.FAILED_PRECONDITION: "the engine's state does not allow the order",
    _C.OUT_OF_RANGE: "the engine found a value out of range",
    _C.UNIMPLEMENTED: "the engine does not offer this",
    _C.RESOURCE_EXHAUSTED: "the engine has no room for another operation",
}
_RETRYABLE_REASONS = frozenset({"ENGINE_BUSY"})


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """The engine's own ErrorInfo; None when there is none that can be read. Only an engine (or
    something that speaks for it) attaches one: its absence means that the transport spoke."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # trailers that contradict the status
        return None
    if status is None:
        return None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            return info
    return None


def refusal_of(error: grpc.aio.AioRpcError) -> OperationError | None:
    """Before acceptance: why nothing was taken on. None: the status does not prove that."""
    code = error.code()
    if code not in _REFUSALS:
        return None
    info = error_info(error)
    if code is _C.RESOURCE_EXHAUSTED and info is None:
        # Our own library says so too, of a reply that is larger than it will take: by then the
        # order was carried out.
        return None
    if code in _AUTH:
        reason = "ENGINE_AUTH_REFUSED"
    elif info is not None and (said := reason_of(info.reason)):
        reason = said
    else:
        reason = code.name
    return OperationError(
        code=code.name,
        reason=reason,
        message=_SAID.get(reason) or _SAID_BY_CODE.get(code) or "the engine refused the order",
        retryable=code is _C.RESOURCE_EXHAUSTED or reason in _RETRYABLE_REASONS,
        effect=FailureEffect.NONE,
    )


def failure_of(error: grpc.aio.AioRpcError) -> OperationError | None:
    """Of a call that answers with the outcome itself: the engine says that it took the order on and
    failed. None: it does not say so."""
    info = error_info(error)
    if info is None or reason_of(info.reason) is None:
        return None
    effect = info.metadata.get("effect")
    if effect is None and error.code() is not _C.INTERNAL:
        return None
    known = effect is not None and effect in {value.value for value in FailureEffect}
    ranks = info.metadata.get("ranks", "").split(",")
    return OperationError(
        code=error.code().name,
        reason=info.reason,
        message="the engine could not carry it out",
        retryable=info.metadata.get("retryable") == "true",
        ranks=tuple(int(rank) for rank in ranks if rank.isascii() and rank.isdigit()),
        effect=FailureEffect(effect) if known else FailureEffect.UNKNOWN,
    )


def lost_because(error: grpc.aio.AioRpcError) -> str:
    """Why the outcome is not known, in words of ours."""
    if error.code() is _C.UNAVAILABLE:
        return "the connection to the engine was lost"
    if error.code() is _C.DEADLINE_EXCEEDED:
        return "the engine did not answer in time"
    return "the engine's reply was cut short"


def is_unknown_operation(error: grpc.aio.AioRpcError) -> bool:
    """Whether the engine itself says that it does not know the operation.

    A NOT_FOUND without ErrorInfo may come from anything on the way. What hangs on it is sending
    an order again, so that is no answer.
    """
    return error.code() is _C.NOT_FOUND and error_info(error) is not None


def silence_of(error: grpc.aio.AioRpcError, *, connected: bool = True) -> EngineSilent:
    """Why a read failed. `connected`: what the channel said of itself when it did; a call that
    waits for a connection until its deadline did not reach a slow engine but none."""
    code = error.code()
    if code in _AUTH:
        return EngineSilent(Silence.AUTH_REFUSED)
    if code is _C.UNAVAILABLE or (code is _C.DEADLINE_EXCEEDED and not connected):
        return EngineSilent(Silence.UNREACHABLE)
    if code in (_C.DEADLINE_EXCEEDED, _C.CANCELLED):
        return EngineSilent(Silence.DEADLINE)
    if code in (_C.INTERNAL, _C.UNKNOWN, _C.DATA_LOSS):
        return EngineSilent(Silence.MALFORMED)
    return EngineSilent(Silence.REFUSED)


def for_the_log(error: grpc.aio.AioRpcError) -> str:
    """Code and text, bounded and on one line. Never for a caller."""
    return f"{error.code().name}: {text_of(error.details() or '', 300)}"
