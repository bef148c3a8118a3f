"""The shape of serving, as it may be ordered."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from app.domain.commands import Command, ReconfigureServing
from app.domain.kinds import DrainRule, EngineRole
from app.http.bodies import BIGGEST, OrderBody

Ranks = Annotated[int, Field(ge=1, le=65536)]
Amount = Annotated[int, Field(ge=1, le=BIGGEST)]


class ReconfigureServingBody(OrderBody):
    """Absolute targets, one at least. What is absent keeps its value."""

    role: Literal["aggregated", "prefill", "decode"] | None = None
    tensor_parallel_size: Ranks | None = Field(None, description="Ranks")
    data_parallel_size: Ranks | None = Field(None, description="Ranks")
    max_running_requests: Amount | None = Field(None, description="Requests")
    max_batched_tokens: Amount | None = Field(None, description="Tokens in one step")
    drain: Annotated[DrainRule, Field(strict=False)] = Field(
        description="Requests that run: wait for them, abort them, or refuse because of them."
    )

    def command(self) -> Command:
        return ReconfigureServing(
            model=self.model,
            role=None if self.role is None else EngineRole(self.role),
            tensor_parallel_size=self.tensor_parallel_size,
            data_parallel_size=self.data_parallel_size,
            max_running_requests=self.max_running_requests,
            max_batched_tokens=self.max_batched_tokens,
            drain=self.drain,
        )
