"""One accepted order, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from app.domain.kinds import FailureEffect, OperationKind, OperationState, Verification
from app.domain.ranks import RankReport

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = Mapping[str, JsonValue]


DEADLINE_PASSED = "DEADLINE_PASSED"
"""The warning of an operation whose outcome is not known when its deadline is over."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who ordered it, as the token said. Idempotency keys are scoped to these three."""

    issuer: str
    subject: str
    client_id: str


@dataclass(frozen=True, slots=True)
class Progress:
    """`total` 0: not known. `unit`: requests, blocks, bytes, tensors, ranks or empty."""

    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""


@dataclass(frozen=True, slots=True)
class OperationWarning:
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class OperationError:
    """How a failed operation ended. `code` is a google.rpc.Code name."""

    code: str
    reason: str
    message: str
    retryable: bool = False
    ranks: tuple[int, ...] = ()
    effect: FailureEffect = FailureEffect.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`sequence`: the number of its last event. `engine_sequence`: the last engine event seen.
    `override_freeze`: it is carried out whatever freeze is in force.

    `queue_position`: of one that is queued, its place among those that wait for the engine when it
    was read, 1 = next. It falls without an event of its own.
    """

    id: str
    engine_id: str
    kind: OperationKind
    state: OperationState
    request: JsonObject
    actor: Actor
    created_at: datetime
    sequence: int = 1
    engine_sequence: int = 0
    engine_operation_id: str | None = None
    engine_instance_id: str | None = None
    idempotency_key: str | None = None
    reason: str | None = None
    expected_revision: int | None = None
    revision: int | None = None
    deadline_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    cancel_requested: bool = False
    result: JsonObject | None = None
    error: OperationError | None = None
    verification: Verification | None = None
    warnings: tuple[OperationWarning, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    progress: Progress | None = None
    queue_position: int | None = None
    trace_id: str | None = None
    override_freeze: bool = False

    @property
    def done(self) -> bool:
        return self.state.terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEvent:
    """`engine_sequence`: the engine's own number, where the event came from the engine."""

    operation_id: str
    engine_id: str
    sequence: int
    type: str
    time: datetime
    data: JsonObject = field(default_factory=dict)
    engine_sequence: int | None = None
