"""The port to an engine: what an engine says becomes domain facts here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from app.domain.capabilities import Capabilities
from app.domain.commands import Command
from app.domain.facts import EngineFacts
from app.domain.operation import JsonObject, OperationError
from app.domain.transitions import Fact


class EngineRefused(Exception):
    """The engine answered before acceptance: it took nothing on, and nothing was changed."""

    def __init__(self, error: OperationError) -> None:
        super().__init__(error.reason)
        self.error = error


class OutcomeLost(Exception):
    """The order may have reached the engine, and the reply that would tell is missing.

    Never a failure: the caller must ask the engine (`find`) before it says or does anything else.
    """


class EngineSilent(Exception):
    """A read got no usable answer. `reason` is UPPER_SNAKE: UNREACHABLE, DEADLINE, AUTH_REFUSED
    (the engine refused OUR credential), MALFORMED, REFUSED."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Discovery:
    """One reading of an engine: what it is, what it can do, and its administrative state."""

    info: JsonObject
    models: tuple[JsonObject, ...]
    capabilities: Capabilities
    facts: EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`operation_id` is the idempotency key at the engine. `deadline_at` (UTC) bounds the whole."""

    operation_id: str
    command: Command
    expected_revision: int | None
    deadline_at: datetime


@dataclass(frozen=True, slots=True)
class Found:
    """The engine knows the operation. `ended`: carrying it out again only replays its events."""

    engine_operation_id: str
    ended: bool
    instance_id: str


class EngineBackend(Protocol):
    """One engine. Every call has a deadline of its own; none of them waits for ever."""

    async def discover(self, timeout_s: float) -> Discovery:
        """Raises EngineSilent."""

    async def load(self, timeout_s: float) -> JsonObject:
        """`running_requests queued_requests used_kv_blocks total_kv_blocks …`; EngineSilent."""

    def carry_out(self, order: Order) -> AsyncIterator[Fact]:
        """Send the order, or attach again to it: the same operation id replays from its first
        event. Facts bear `engine_sequence` where the engine counts; the last one is Completed,
        Failed or Cancelled, and the iterator then ends.

        Raises EngineRefused (nothing taken on) or OutcomeLost (must be asked). Closing the
        iterator detaches; it never undoes anything.
        """

    async def find(self, operation_id: str, timeout_s: float) -> Found | None:
        """None: the engine answered and does not know it. Raises EngineSilent."""

    async def cancel(self, engine_operation_id: str, timeout_s: float) -> None:
        """Ask. The end comes through `carry_out`. Raises EngineRefused or EngineSilent."""

    async def close(self) -> None: ...
