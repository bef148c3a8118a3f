"""An operation, as a resource."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field, JsonValue

from app.domain.kinds import OperationKind, OperationState, Verification
from app.domain.operation import Operation, OperationError
from app.domain.ranks import RankState
from app.http.documents.actor import ActorDocument

Fields = dict[str, JsonValue]


class RankDocument(BaseModel):
    rank: int
    state: RankState
    message: str


class ProgressDocument(BaseModel):
    phase: str
    done: int
    total: int = Field(description="0: not known")
    unit: str


class WarningDocument(BaseModel):
    reason: str
    message: str


class ErrorDocument(BaseModel):
    code: str = Field(description="A google.rpc.Code name")
    reason: str
    message: str
    retryable: bool
    ranks: list[int]
    effect: str = Field(description="none, rolled_back, applied_in_part or unknown")

    @classmethod
    def of(cls, error: OperationError) -> ErrorDocument:
        return cls(
            code=error.code,
            reason=error.reason,
            message=error.message,
            retryable=error.retryable,
            ranks=list(error.ranks),
            effect=error.effect.value,
        )


class OperationDocument(BaseModel):
    id: str
    engine: str
    kind: OperationKind
    state: OperationState
    done: bool
    request: Fields
    result: Fields | None
    error: ErrorDocument | None
    verification: Verification | None
    warnings: list[WarningDocument]
    ranks: list[RankDocument]
    progress: ProgressDocument | None
    queue_position: int | None = Field(
        description="Of one that is queued: its place among those that wait, 1 is next"
    )
    sequence: int = Field(description="The number of its last event")
    expected_revision: int | None
    revision: int | None = Field(description="The engine's, after it")
    idempotency_key: str | None
    principal: ActorDocument
    reason: str | None
    deadline_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    trace_id: str | None

    @classmethod
    def of(cls, operation: Operation) -> OperationDocument:
        error, progress, actor = operation.error, operation.progress, operation.actor
        return cls(
            id=operation.id,
            engine=operation.engine_id,
            kind=operation.kind,
            state=operation.state,
            done=operation.done,
            request=dict(operation.request),
            result=None if operation.result is None else dict(operation.result),
            error=None if error is None else ErrorDocument.of(error),
            verification=operation.verification,
            warnings=[
                WarningDocument(reason=w.reason, message=w.message) for w in operation.warnings
            ],
            ranks=[
                RankDocument(rank=r.rank, state=r.state, message=r.message) for r in operation.ranks
            ],
            progress=None
            if progress is None
            else ProgressDocument(
                phase=progress.phase,
                done=progress.done,
                total=progress.total,
                unit=progress.unit,
            ),
            queue_position=operation.queue_position,
            sequence=operation.sequence,
            expected_revision=operation.expected_revision,
            revision=operation.revision,
            idempotency_key=operation.idempotency_key,
            principal=ActorDocument.of(actor),
            reason=operation.reason,
            deadline_at=operation.deadline_at,
            created_at=operation.created_at,
            started_at=operation.started_at,
            ended_at=operation.ended_at,
            trace_id=operation.trace_id,
        )


class OperationPage(BaseModel):
    items: list[OperationDocument]
    next_page_token: str | None
