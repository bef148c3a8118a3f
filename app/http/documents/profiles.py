"""Profiles of an engine."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import cast
from urllib.parse import quote

from pydantic import BaseModel, Field

from app.domain.commands import StartProfile
from app.domain.kinds import OperationState, ProfilerKind
from app.domain.operation import Operation
from app.http.documents.actor import ActorDocument
from app.http.documents.operation import ErrorDocument
from app.operations.profiles import artifacts_of


class ProfileStage(StrEnum):
    """`attached`: it was running already, under another operation of the same `profile_id`."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    EXPORTING = "exporting"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    ATTACHED = "attached"


class ArtifactDocument(BaseModel):
    rank: int
    path: str = Field(description="Below the engine's own root")
    size_bytes: int
    sha256: str
    media_type: str
    download: str | None = Field(description="Where it can be fetched; null: not from here")


class ProfileDocument(BaseModel):
    id: str = Field(description="Of its operation")
    engine: str
    profile_id: str | None = Field(description="What the engine calls it, once it has taken it on")
    profiler: ProfilerKind
    state: ProfileStage
    steps: int | None
    duration_ms: int | None
    record_shapes: bool
    with_stack: bool
    artifacts: list[ArtifactDocument]
    error: ErrorDocument | None
    principal: ActorDocument
    reason: str | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def of(cls, operation: Operation, *, downloadable: bool) -> ProfileDocument:
        command = StartProfile.of(operation.request)
        result = operation.result or {}
        named = cast("str | None", result.get("profile_id")) or operation.engine_operation_id
        path = f"/v1/engines/{quote(operation.engine_id)}/profiles/{operation.id}/artifact"
        return cls(
            id=operation.id,
            engine=operation.engine_id,
            profile_id=named,
            profiler=command.profiler,
            state=_stage(operation),
            steps=command.steps,
            duration_ms=command.duration_ms,
            record_shapes=command.record_shapes,
            with_stack=command.with_stack,
            artifacts=[
                ArtifactDocument(
                    rank=one.rank,
                    path=one.path,
                    size_bytes=one.size_bytes,
                    sha256=one.sha256,
                    media_type=one.media_type,
                    download=f"{path}?rank={one.rank}" if downloadable else None,
                )
                for one in artifacts_of(operation)
            ],
            error=None if operation.error is None else ErrorDocument.of(operation.error),
            principal=ActorDocument.of(operation.actor),
            reason=operation.reason,
            created_at=operation.created_at,
            started_at=operation.started_at,
            ended_at=operation.ended_at,
        )


class ProfilePage(BaseModel):
    items: list[ProfileDocument]
    next_page_token: str | None


_STAGES = {
    OperationState.ACCEPTED: ProfileStage.ACCEPTED,
    OperationState.QUEUED: ProfileStage.ACCEPTED,
    OperationState.RECONCILING: ProfileStage.UNKNOWN,
    OperationState.FAILED: ProfileStage.FAILED,
    OperationState.CANCELLED: ProfileStage.CANCELLED,
}


def _stage(operation: Operation) -> ProfileStage:
    if operation.state is OperationState.SUCCEEDED:
        attached = (operation.result or {}).get("changed") is False
        return ProfileStage.ATTACHED if attached else ProfileStage.READY
    if operation.state in _STAGES:
        return _STAGES[operation.state]
    exporting = operation.progress is not None and operation.progress.phase == "exporting"
    return ProfileStage.EXPORTING if exporting else ProfileStage.RUNNING
