"""An order that is being carried out: what it may use, and how it may end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from app.domain.commands import Command
from app.domain.operation import JsonObject, JsonValue, Operation, OperationWarning, Progress
from app.domain.transitions import Fact
from app.enginekit.phases import BeforePrepare, Interrupts
from app.enginekit.records import NO_CHANGE, Change, Counters
from app.enginekit.runtime import Conclusion, EngineDescription, Flushed, Observation, Runtime
from app.enginekit.sessions import OpenSession
from app.enginekit.state import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an order succeeds. `settle` runs between the commit and the telling. `shows`: whether
    what the runtime says of itself afterwards is what was ordered; where it does not, or `proved`
    is false, the end is told as unverified."""

    result: Callable[[Counters], JsonObject]
    change: Change = NO_CHANGE
    settle: Callable[[Counters, Observation | None], None] | None = None
    shows: Callable[[Observation], bool] | None = None
    proved: bool = True
    warnings: tuple[OperationWarning, ...] = ()


class OverRanks(Protocol):
    """Two phases over all ranks. Raises OrderFailed, CancelAsked, DeadlinePassed."""

    async def __call__(
        self,
        command: Command | None = None,
        *,
        part: str = "",
        before_commit: Callable[[], Awaitable[None]] | None = None,
        before_prepare: BeforePrepare | None = None,
        rescue: bool = False,
    ) -> Conclusion:
        """`command` None: the order itself. `part` names a way over the ranks that is not the
        order's own. `rescue`: it has to be done whatever the deadline says, and has a time of its
        own."""


class Record(Protocol):
    async def __call__(
        self, fact: Fact, change: Change = NO_CHANGE, then: Callable[[], None] | None = None
    ) -> None:
        """Raises StoreUnavailable."""


@dataclass(slots=True, kw_only=True)
class Errand:
    """`undo` is what a failure or a cancellation has to put back in admission, with the counters
    that this raises. `end_requests` aborts all that is in flight; the number it returns is of
    those that it ended. Raises OrderFailed or DeadlinePassed. `session`: of an update in pieces."""

    operation: Operation
    command: Command
    runtime: Runtime
    session: OpenSession | None
    state: EngineState
    interrupts: Interrupts
    started_at: datetime
    default_hold_limit_ms: int
    ranks: Callable[[], tuple[int, ...]]
    describe: Callable[[], EngineDescription]
    over_ranks: OverRanks
    end_requests: Callable[[str], Awaitable[int]]
    record: Record
    report: Callable[[Progress], None]
    undo: Callable[[], None] | None = None
    undo_change: Change = field(default=NO_CHANGE)


def flushed_rows(flushed: Iterable[Flushed]) -> list[JsonValue]:
    return [
        {
            "kind": cache.kind.value,
            "blocks_freed": cache.blocks_freed,
            "blocks_in_use": cache.blocks_in_use,
        }
        for cache in flushed
    ]
