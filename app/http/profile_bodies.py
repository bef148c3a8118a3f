"""Profiles as they may be ordered."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from app.domain.commands import Command, StartProfile
from app.domain.kinds import ProfilerKind
from app.http.bodies import OrderBody


class StartProfileBody(OrderBody):
    """Bounded by `steps` or by `duration_ms`; without either it records until it is stopped. At its
    deadline it fails, and what was recorded is lost."""

    profiler: Annotated[ProfilerKind, Field(strict=False)]
    steps: Annotated[int, Field(ge=1, le=2**31)] | None = Field(None, description="Of the engine")
    duration_ms: Annotated[int, Field(ge=1, le=86_400_000)] | None = None
    record_shapes: bool = False
    with_stack: bool = False

    def command(self) -> Command:
        return StartProfile(
            model=self.model,
            profiler=self.profiler,
            steps=self.steps,
            duration_ms=self.duration_ms,
            record_shapes=self.record_shapes,
            with_stack=self.with_stack,
        )
