"""How an order ends that never went to its engine: with effect `none`."""

from __future__ import annotations

from app.domain.errors import ChadburnError, EngineFrozen
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError
from app.domain.transitions import Failed


def too_late(message: str) -> Failed:
    return Failed(
        error=OperationError(
            "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", message, effect=FailureEffect.NONE
        )
    )


def nothing_to_send() -> Failed:
    message = "the gateway has lost what goes with the order; it was not sent"
    return Failed(
        error=OperationError("DATA_LOSS", "PAYLOAD_LOST", message, effect=FailureEffect.NONE)
    )


def frozen(refused: EngineFrozen) -> Failed:
    return Failed(
        error=OperationError(
            "FAILED_PRECONDITION",
            refused.reason,
            refused.message,
            retryable=refused.retryable,
            effect=FailureEffect.NONE,
        )
    )


def not_sent(error: ChadburnError) -> Failed:
    code = "UNAUTHENTICATED" if error.reason == "ENGINE_AUTH_REFUSED" else "UNAVAILABLE"
    return Failed(
        error=OperationError(code, error.reason, error.message, effect=FailureEffect.NONE)
    )
