"""Carries accepted orders out, and sees each of them to its end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from app.backends.telling import Trouble
from app.clock import Clock
from app.domain.operation import Operation
from app.ledger.ledger import Ledger
from app.operations.backoff import Backoff
from app.operations.desk import Desk
from app.operations.fleet import Fleet
from app.operations.pace import Pace
from app.operations.watched import NOWHERE, Origin, Watched

log = logging.getLogger(__name__)

_DEFAULT_PACE = Pace()


class Runner:
    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        clock: Clock,
        *,
        owner: str,
        pace: Pace = _DEFAULT_PACE,
        jitter: Callable[[], float] = random.random,
        watched: Watched | None = None,
    ) -> None:
        """`owner` names this process in leases: a new one at each start."""
        self._ledger = ledger
        self._fleet = fleet
        self._clock = clock
        self._owner = owner
        self._pace = pace
        self._backoff = Backoff(pace.retry_first_s, pace.retry_most_s, jitter)
        self._watched = watched or Watched()
        self._desks: dict[str, Desk] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._stopped = False
        self._trouble = Trouble(log, "open operations")

    async def start(self) -> None:
        """Take up every open operation of the ledger. What was not sent is sent, or fails if its
        deadline is over; of what was sent the engine is asked. Returns at once."""
        if self._sweeping is None and not self._stopped:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep_for_ever())

    def take(self, operation: Operation, origin: Origin = NOWHERE) -> None:
        """Drive it from now on. Called right after the commit that accepted or changed it; an
        operation that this call is lost for is found by the next sweep. `origin`: of one that was
        accepted."""
        if not self._stopped:
            self._desk(operation.engine_id).offer((operation,), origin=origin)

    async def stop(self, grace_s: float) -> None:
        """Let go: nothing is cancelled at an engine, and the next start settles what is open.
        Waits at most `grace_s` for writes under way. May be called twice."""
        self._stopped = True
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
        desks = [asyncio.ensure_future(desk.stop()) for desk in self._desks.values()]
        if desks:
            _, late = await asyncio.wait(desks, timeout=grace_s)
            if late:
                log.warning("%d engines were let go while their ledger was slow", len(late))

    def _desk(self, engine_id: str) -> Desk:
        desk = self._desks.get(engine_id)
        if desk is None:
            desk = Desk(
                engine_id,
                self._ledger,
                self._fleet,
                self._clock,
                owner=self._owner,
                pace=self._pace,
                backoff=self._backoff,
                watched=self._watched,
            )
            self._desks[engine_id] = desk
        return desk

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                await self._sweep()
                self._trouble.over()
            except Exception as error:
                # Whatever it is, nothing open may be left lying for it.
                said = f"they could not be looked for: {error!r}"
                self._trouble.seen(logging.WARNING, said, "sweep")
            await asyncio.sleep(self._pace.sweep_s)

    async def _sweep(self) -> None:
        """What is open by the ledger's word. That finds what a process before this one left, what
        another gateway accepted for an engine that is driven here, and what it cancelled."""
        known = {engine_id: desk.known() for engine_id, desk in self._desks.items()}
        marks = await self._ledger.operations.open_marks()
        here = {name: at for of_engine in known.values() for name, at in of_engine.items()}
        # Read whole only where there is news: with a fleet at work there are thousands.
        news = {
            each.operation_id for each in marks if here.get(each.operation_id, -1) < each.sequence
        }
        offered: dict[str, list[Operation]] = {each.engine_id: [] for each in marks if each.waits}
        for operation in await self._ledger.operations.several(news) if news else ():
            offered.setdefault(operation.engine_id, []).append(operation)
        still_open = {each.operation_id for each in marks}
        gone = {name: of_engine.keys() - still_open for name, of_engine in known.items()}
        # Also to one whose work a fault has ended, and that has the same open as before.
        stalled = {name for name, desk in self._desks.items() if desk.idle}
        for engine_id in offered.keys() | stalled | {name for name in gone if gone[name]}:
            self._desk(engine_id).offer(offered.get(engine_id, ()), gone.get(engine_id, ()))
        for engine_id in [each for each, desk in self._desks.items() if desk.idle]:
            del self._desks[engine_id]
