"""A gateway without its HTTP: ledger, fleet, runner and orders, started, left and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, cast

from app.backends.credentials import Credentials
from app.backends.reach import ReachPolicy
from app.backends.registry import Backends
from app.backends.streams import StreamLimits
from app.clock import uuid7
from app.domain.commands import Command, FlushCaches, Pause
from app.domain.engine import Dialect, Member
from app.domain.events import TERMINAL_EVENTS
from app.domain.kinds import CacheKind, OperationState, PauseMode
from app.domain.operation import Actor, Operation, OperationEvent
from app.ledger import Ledger
from app.operations.callers import Caller
from app.operations.deadlines import Deadlines
from app.operations.fleet import Fleet
from app.operations.orders import OrderRequest, Orders
from app.operations.pace import Pace
from app.operations.registering import EngineDraft
from app.operations.runner import Runner
from app.operations.sessions import Sessions
from app.operations.watched import Watched

ALICE = Actor("https://issuer.test", "alice", "cli")
CALLER = Caller(actor=ALICE)
LOOPBACK = ReachPolicy(cidrs=("127.0.0.0/8",))
BRISK = Pace(
    lease_ttl_s=3.0,
    sweep_s=0.05,
    find_timeout_s=1.0,
    cancel_timeout_s=1.0,
    after_end_s=0.5,
    transit_s=0.1,
    retry_first_s=0.01,
    retry_most_s=0.1,
)
QUICK = StreamLimits(idle_s=0.3, ask_s=1.0, settle_s=0.5, attached_s=5.0, abort_s=1.0)

DRAIN = Pause(mode=PauseMode.DRAIN)
FLUSH = FlushCaches(caches=(CacheKind.PREFIX,))


class ShiftedClock:
    """The time of day, put forward at will."""

    def __init__(self) -> None:
        self._shift = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self._shift

    def go(self, seconds: float) -> None:
        self._shift += timedelta(seconds=seconds)


class Gateway:
    """`backends`: what the fleet reaches engines through; None: real gRPC to loopback.
    `ledger`: opened by `start` at `url`; `seen_as` may put something in front of it."""

    def __init__(
        self,
        url: str,
        *,
        clock: ShiftedClock | None = None,
        pace: Pace = BRISK,
        make_backends: Callable[[ShiftedClock], Any] | None = None,
        seen_as: Callable[[Ledger], Any] = lambda ledger: ledger,
    ) -> None:
        self.clock = clock or ShiftedClock()
        self._url = url
        self._pace = pace
        self._make_backends = make_backends or _real_backends
        self._seen_as = seen_as
        self._lives = count(1)
        self.ledger: Ledger
        self.fleet: Fleet
        self.runner: Runner
        self.orders: Orders
        self.sessions: Sessions

    async def start(self) -> None:
        await self.open()
        await self.runner.start()

    async def open(self) -> None:
        """All but the runner's own look for open operations."""
        self.ledger = await Ledger.open(self._url, clock=self.clock, migrate=True)
        seen = cast("Ledger", self._seen_as(self.ledger))
        self.fleet = Fleet(
            seen, self._make_backends(self.clock), self.clock, observe_interval_s=3600.0
        )
        owner = f"gateway-{next(self._lives)}"
        self.watched = Watched()
        self.runner = Runner(
            seen, self.fleet, self.clock, owner=owner, pace=self._pace, watched=self.watched
        )
        self.orders = Orders(
            seen, self.fleet, self.runner, self.clock, uuid7, deadlines=Deadlines()
        )
        self.sessions = Sessions(seen, self.fleet, self.runner, self.clock)

    async def stop(self) -> None:
        await self.runner.stop(5.0)
        await self.fleet.stop()
        await self.ledger.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    # ---- what tests do with it ----

    async def register(self, address: str, engine_id: str = "e1", wait_s: float = 5.0) -> None:
        draft = EngineDraft(
            id=engine_id, dialect=Dialect.OPENENGINE, members=(Member(0, address, address),)
        )
        await self.fleet.register(draft, CALLER)
        await self.fleet.reread(engine_id, wait_s)

    async def give(self, command: Command = DRAIN, engine_id: str = "e1", **more: Any) -> Operation:
        return (await self.orders.submit(request(command, engine_id, **more))).operation

    async def end_of(self, operation: Operation | str) -> Operation:
        """The operation when it has ended, checked for the promises of a stream."""
        operation_id = operation if isinstance(operation, str) else operation.id
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + 30.0
        with self.ledger.events.subscribe() as news:
            ended = await self.ledger.operations.get(operation_id)
            while ended is not None and not ended.done and loop.time() < ends_at:
                await news.changed(1.0)
                ended = await self.ledger.operations.get(operation_id)
        assert ended is not None
        assert ended.done, f"{operation_id} is still {ended.state}"
        await self.events_of(operation_id)
        return ended

    async def events_of(self, operation_id: str) -> list[OperationEvent]:
        """All events: without a gap, and with one end at most, which is the last."""
        stored = await self.ledger.events.of_operation(operation_id)
        events = [each.event for each in stored]
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        ends = [event for event in events if event.type in TERMINAL_EVENTS]
        operation = await self.ledger.operations.get(operation_id)
        assert operation is not None
        assert len(ends) == (1 if operation.done else 0)
        assert not ends or ends[0] is events[-1]
        heard = [e.engine_sequence for e in events if e.engine_sequence is not None]
        assert heard == sorted(set(heard))
        return events

    async def types_of(self, operation_id: str) -> list[str]:
        return [event.type for event in await self.events_of(operation_id)]

    async def state_of(self, operation: Operation) -> OperationState:
        known = await self.ledger.operations.get(operation.id)
        assert known is not None
        return known.state

    async def until(self, operation: Operation, state: OperationState) -> Operation:
        async def reached() -> bool:
            return await self.state_of(operation) is state

        await until(reached)
        known = await self.ledger.operations.get(operation.id)
        assert known is not None
        return known


def request(command: Command = DRAIN, engine_id: str = "e1", **more: Any) -> OrderRequest:
    values: dict[str, Any] = {"key": uuid7(), "fingerprint": "f", "actor": ALICE}
    return OrderRequest(engine_id=engine_id, command=command, **(values | more))


def _real_backends(clock: ShiftedClock) -> Backends:
    return Backends(LOOPBACK, Credentials({}, clock), clock, limits=QUICK)


@asynccontextmanager
async def running_gateway(folder: Path, **options: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(f"sqlite+aiosqlite:///{folder}/ledger.db", **options)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def until(holds: Callable[[], Any | Awaitable[Any]]) -> None:
    """Until it holds; the test's own time limit is the bound."""
    while True:
        value = holds()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        await asyncio.sleep(0.005)
