"""What the layer refuses, beside what the use cases refuse anyway."""

from __future__ import annotations

from app.domain.errors import (
    DeadlineExceeded,
    EngineFault,
    FailedPrecondition,
    InvalidArgument,
    UnsupportedOperation,
)
from app.domain.operation import Operation, OperationError


class Invalid(InvalidArgument):
    """A parameter that is not what it has to be. `place` is dotted: `query.mode`, `body.init_info`;
    empty: the request as a whole. `kind` is the word that pydantic has for such a fault."""

    def __init__(self, place: str, kind: str, message: str) -> None:
        super().__init__(message)
        self.place = place
        self.kind = kind


class BadBody(InvalidArgument):
    """A request that the endpoint's own code turns down."""


class BadInput(InvalidArgument):
    """An adapter order that makes no sense; vLLM has a word of its own for these."""


class WouldHarm(FailedPrecondition):
    """vLLM would take it, and be the worse for it."""


class NotYours(FailedPrecondition):
    """The pause in force is another caller's, and only theirs to lift."""


class NeverOffered(UnsupportedOperation):
    """Calls that are no order, as those of whatever method a caller names, are not passed on to any
    engine. `why` None: that."""

    def __init__(self, why: str | None = None) -> None:
        super().__init__(
            why
            or "This gateway passes no method of a caller's choice on to an engine. Each "
            "administrative order has an endpoint of its own."
        )


class OrderFailed(EngineFault):
    """The order was carried out, and has failed or was cancelled."""

    def __init__(self, operation: Operation) -> None:
        error = operation.error
        said = error.message if error is not None else "the order was cancelled"
        super().__init__(said, operation_id=operation.id)
        self.error: OperationError | None = error


class OutcomeUnknown(DeadlineExceeded):
    """It was sent, and nobody knows how it ended."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(
            f"It is not known yet how operation {operation.id} has ended; the same call waits for "
            "it again.",
            operation_id=operation.id,
        )
