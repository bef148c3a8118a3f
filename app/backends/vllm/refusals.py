"""Why an order is not sent, or how it failed, in the words of an operation's end. Pure."""

from __future__ import annotations

from app.backends.codes import code_of
from app.backends.port import EngineRefused
from app.domain import errors as domain
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError


def refused(code: str, reason: str, message: str, *, retryable: bool = False) -> EngineRefused:
    """Nothing is sent."""
    return EngineRefused(
        OperationError(code, reason, message, retryable, effect=FailureEffect.NONE)
    )


def refused_by(error: domain.ChadburnError) -> EngineRefused:
    return refused(code_of(error), error.reason, error.message, retryable=error.retryable)


def unknown(
    reason: str, message: str, ranks: tuple[int, ...] = (), *, in_part: bool = False
) -> OperationError:
    """What the order has done is not known, or was done in part."""
    effect = FailureEffect.APPLIED_IN_PART if in_part else FailureEffect.UNKNOWN
    return OperationError("UNKNOWN", reason, message, ranks=ranks, effect=effect)


def restarted(ranks: tuple[int, ...]) -> OperationError:
    message = "the engine was restarted while the order was under way"
    return unknown("ENGINE_RESTARTED", message, ranks)


def dead() -> OperationError:
    message = "the engine behind the front end does not answer any more"
    return OperationError("UNAVAILABLE", "ENGINE_DEAD", message, effect=FailureEffect.UNKNOWN)
