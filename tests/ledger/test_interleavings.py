"""Any interleaving of accepting and recording leaves a sequence without gaps and one end.

Batches of attempts run at once, many of them from an outdated view; which of them land is up to
the database. On both databases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import anyio.from_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.clock import uuid7
from app.domain.errors import EngineBusy, IdempotencyKeyReused, QueueFull
from app.domain.events import TERMINAL_EVENTS
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Operation, OperationError, OperationWarning, Progress
from app.domain.queueing import Queueing
from app.domain.ranks import RankReport, RankState
from app.domain.transitions import (
    Advanced,
    Cancelled,
    CancelRequested,
    Completed,
    Dispatched,
    EngineAccepted,
    Fact,
    Failed,
    OutcomeUnknown,
    Progressed,
    RankReported,
    Reattached,
    Settled,
    Warned,
    advance,
)
from app.ledger import Ledger
from app.ledger.errors import Superseded
from app.ledger.values import EventFilter
from tests.ledger.samples import START, SetClock, claim, entry, order, with_engine

FACTS: list[Fact] = [
    Dispatched(),
    EngineAccepted(engine_operation_id="eop"),
    Progressed(progress=Progress("on")),
    RankReported(report=RankReport(0, RankState.COMMITTED)),
    Warned(warning=OperationWarning("W", "w")),
    CancelRequested(),
    OutcomeUnknown(message="lost"),
    Reattached(),
    Completed(result={}),
    Failed(error=OperationError("INTERNAL", "F", "f")),
    Cancelled(message="c"),
    Settled(end=OperationState.SUCCEEDED, by="alice", reason="s"),
]


@dataclass(frozen=True)
class Order:
    kind: OperationKind
    key: int | None
    queued: bool
    waits: bool


@dataclass(frozen=True)
class Step:
    """`back`: from how many views ago."""

    target: int
    back: int
    fact: Fact


orders = st.builds(
    Order,
    st.sampled_from([OperationKind.PAUSE, OperationKind.ABORT_REQUESTS]),
    st.none() | st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
steps = st.builds(Step, st.integers(0, 5), st.sampled_from([0, 0, 0, 1, 2]), st.sampled_from(FACTS))
histories = st.lists(st.lists(orders | steps | steps, min_size=1, max_size=5), max_size=12)


@dataclass
class History:
    ledger: Ledger
    engine_id: str = field(default_factory=uuid7)
    views: dict[str, list[Operation]] = field(default_factory=dict)

    async def attempt(self, action: Order | Step) -> None:
        if isinstance(action, Order):
            await self._order(action)
        elif self.views:
            await self._step(action)

    async def _order(self, wanted: Order) -> None:
        key = None if wanted.key is None else claim(f"{self.engine_id}-{wanted.key}")
        try:
            accepted = await self.ledger.operations.accept(
                order(wanted.kind, self.engine_id),
                key=key,
                audit=entry(),
                queueing=Queueing(2, in_any_case=wanted.waits) if wanted.queued else None,
            )
        except (EngineBusy, IdempotencyKeyReused, QueueFull):
            return
        if accepted.fresh:
            self.views[accepted.operation.id] = [accepted.operation]

    async def _step(self, wanted: Step) -> None:
        views = list(self.views.values())[wanted.target % len(self.views)]
        before = views[max(0, len(views) - 1 - wanted.back)]
        advanced = advance(before, wanted.fact, START)
        if not isinstance(advanced, Advanced):
            return
        try:
            after = await self.ledger.operations.record(before, advanced)
        except (Superseded, EngineBusy):
            return
        views.append(after)

    async def check(self) -> None:
        mine = EventFilter(engine_ids=frozenset({self.engine_id}))
        events, _ = await self.ledger.events.after(0, mine, limit=10_000)
        in_slot = 0
        for operation_id, views in self.views.items():
            stored = await self.ledger.operations.get(operation_id)
            assert stored is not None
            last = replace(views[-1], queue_position=stored.queue_position)
            assert stored == last, "what landed last is what stands there"
            assert len(views) == len({view.sequence for view in views})
            own = [found.event for found in events if found.event.operation_id == operation_id]
            assert [event.sequence for event in own] == list(range(1, stored.sequence + 1))
            ends = [event.type for event in own if event.type in TERMINAL_EVENTS]
            assert len(ends) == stored.done
            assert own[-1].type in ends or not stored.done
            in_slot += (
                stored.kind.exclusive
                and not stored.done
                and stored.state is not OperationState.QUEUED
            )
        assert in_slot <= 1
        line = await self.ledger.operations.line(self.engine_id)
        assert (line.holder is not None) == in_slot
        assert len(line.waiting) <= 2
        for place, waits in enumerate(line.waiting, start=1):
            known = await self.ledger.operations.get(waits)
            assert known is not None
            assert known.queue_position == place
        assert {found.event.operation_id for found in events} == set(self.views)


async def play(ledger: Ledger, batches: list[list[Order | Step]]) -> None:
    history = History(ledger)
    await with_engine(ledger, history.engine_id)
    for batch in batches:
        await asyncio.gather(*(history.attempt(action) for action in batch))
    await history.check()


@pytest.fixture(scope="module")
def portal() -> Iterator[anyio.from_thread.BlockingPortal]:
    with anyio.from_thread.start_blocking_portal("asyncio") as portal:
        yield portal


Player = Callable[[list[list[Order | Step]]], None]


@pytest.fixture
def player(portal: anyio.from_thread.BlockingPortal, ledger_url: str) -> Iterator[Player]:
    """One ledger for all examples: each has an engine of its own."""

    async def opened() -> Ledger:
        return await Ledger.open(ledger_url, clock=SetClock(), migrate=True)

    ledger = portal.call(opened)
    try:
        yield lambda batches: portal.call(play, ledger, batches)
    finally:
        portal.call(ledger.close)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(batches=histories)
def test_any_history_leaves_whole_operations(
    player: Player, batches: list[list[Order | Step]]
) -> None:
    player(batches)
