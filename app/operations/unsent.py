"""How an order ends that never went to its engine: with effect `none`."""

from __future__ import annotations

from app.backends.codes import code_of
from app.domain import errors as domain
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError
from app.domain.transitions import Failed


def too_late(message: str) -> Failed:
    return _failed("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", message)


def nothing_to_send() -> Failed:
    message = "the gateway has lost what goes with the order; it was not sent"
    return _failed("DATA_LOSS", "PAYLOAD_LOST", message)


def not_sent(error: domain.ChadburnError) -> Failed:
    """For the reason for which it would be refused if it were given now."""
    return _failed(code_of(error), error.reason, error.message, retryable=error.retryable)


def _failed(code: str, reason: str, message: str, *, retryable: bool = False) -> Failed:
    return Failed(error=OperationError(code, reason, message, retryable, effect=FailureEffect.NONE))
