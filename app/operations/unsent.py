"""How an order ends that never went to its engine: with effect `none`."""

from __future__ import annotations

from app.domain import errors as domain
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError
from app.domain.transitions import Failed

# Branch of the tree: google.rpc.Code. The first that an error is an instance of.
_CODES: tuple[tuple[type[domain.ChadburnError], str], ...] = (
    (domain.InvalidArgument, "INVALID_ARGUMENT"),
    (domain.NotFound, "NOT_FOUND"),
    (domain.AlreadyExists, "ALREADY_EXISTS"),
    (domain.Aborted, "ABORTED"),
    (domain.FailedPrecondition, "FAILED_PRECONDITION"),
    (domain.Unimplemented, "UNIMPLEMENTED"),
    (domain.EngineAuthRefused, "UNAUTHENTICATED"),
    (domain.ChadburnError, "UNAVAILABLE"),
)


def too_late(message: str) -> Failed:
    return _failed("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", message)


def nothing_to_send() -> Failed:
    message = "the gateway has lost what goes with the order; it was not sent"
    return _failed("DATA_LOSS", "PAYLOAD_LOST", message)


def not_sent(error: domain.ChadburnError) -> Failed:
    """For the reason for which it would be refused if it were given now."""
    code = next(code for branch, code in _CODES if isinstance(error, branch))
    return _failed(code, error.reason, error.message, retryable=error.retryable)


def _failed(code: str, reason: str, message: str, *, retryable: bool = False) -> Failed:
    return Failed(error=OperationError(code, reason, message, retryable, effect=FailureEffect.NONE))
