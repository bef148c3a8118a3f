"""What is told of driving operations: figures, spans, and which lines of the log are whose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from app.domain.kinds import OperationState
from app.domain.operation import Operation
from app.observability.metrics import Metrics
from app.observability.spans import (
    NO_SPAN,
    NO_TRACING,
    Attributes,
    OfOperation,
    Span,
    Tracing,
    spanned,
)
from app.observability.tracing import of_operation

_NOT_WELL = frozenset({OperationState.FAILED})


@dataclass(frozen=True, slots=True)
class Origin:
    """What only the process that took an order on knows of its request, and the ledger does not."""

    request_id: str | None = None
    sampled: bool | None = None


NOWHERE = Origin()


@dataclass(frozen=True, slots=True)
class Watched:
    """Where it is told. The default: nowhere."""

    metrics: Metrics = field(default_factory=Metrics)
    tracing: Tracing = NO_TRACING

    @contextmanager
    def taking_on(self, operation: Operation) -> Iterator[Span]:
        """Around the transaction that writes an order down."""
        name = f"take on {operation.kind.value}"
        with spanned(self.tracing, name, _about(operation), own=operation.id) as span:
            yield span

    @contextmanager
    def driving(self, operation: Operation, origin: Origin) -> Iterator[Span]:
        """Around the driving of an operation, which goes on when its request is long over, and
        begins anew wherever it is taken up."""
        above = OfOperation(operation.id, operation.trace_id, origin.sampled)
        name = f"drive {operation.kind.value}"
        with (
            of_operation(operation, origin.request_id),
            spanned(self.tracing, name, _about(operation), parent=above) as span,
        ):
            yield span


def tell_written(span: Span, operation: Operation) -> None:
    """One more event of it stands in the ledger."""
    if span is NO_SPAN:
        return
    state = operation.state
    span.event("written", {"sequence": operation.sequence, "state": state.value})
    if operation.done:
        span.note({"chadburn.operation.state": state.value})
        if state in _NOT_WELL:
            error = operation.error
            span.fail(state.value if error is None else error.reason)


def _about(operation: Operation) -> Attributes:
    return {
        "chadburn.operation": operation.id,
        "chadburn.engine": operation.engine_id,
        "chadburn.kind": operation.kind.value,
    }
