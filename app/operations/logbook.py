"""Writing down what happens to one operation: in order, under the lease, and never dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import TypeVar

from app.backends.telling import Trouble
from app.clock import Clock
from app.domain.errors import EngineBusy, EngineFrozen
from app.domain.operation import Operation
from app.domain.transitions import Advanced, Fact, Refusal, Rejected, advance
from app.ledger.errors import Superseded
from app.ledger.ledger import Ledger
from app.ledger.stages import StoredStage
from app.ledger.values import Lease
from app.operations.auditing import end_entry
from app.operations.backoff import Backoff

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# An engine may be away for hours; the database is everybody's, and when it is back an end that is
# known already is not to wait any longer to be told.
_LONGEST_PAUSE_S = 2.0


def _nothing(_operation: Operation) -> None:
    pass


class LetGo(Exception):
    """The lease is gone: somebody else drives the engine, and nothing more may be written."""


class Logbook:
    """The operation as this process knows it, and the only way its course is written.

    Two may write at the same time: whoever drives the operation here, and a caller who cancels
    it. The ledger lets one of them through; the other reads again and judges its fact anew.
    """

    def __init__(
        self,
        ledger: Ledger,
        operation: Operation,
        clock: Clock,
        backoff: Backoff,
        *,
        lease: Callable[[], Lease],
        still_ours: Callable[[], Awaitable[bool]],
    ) -> None:
        """`still_ours`: ask the ledger whether the lease holds."""
        self.written: Callable[[Operation], None] = _nothing
        """Told of each entry that this process makes."""
        self._ledger = ledger
        self._operation = operation
        self._clock = clock
        self._backoff = backoff
        self._lease = lease
        self._still_ours = still_ours
        self._writing = asyncio.Lock()
        self._trouble = Trouble(log, f"operation {operation.id}")

    @property
    def operation(self) -> Operation:
        return self._operation

    @property
    def leased_until(self) -> datetime:
        """UTC. Before that moment nobody else drives the engine."""
        return self._lease().expires_at

    async def confirm_lease(self) -> None:
        """Renew it, if it is still ours. Raises LetGo."""
        if not await self._persist(self._still_ours):
            raise LetGo

    def learn(self, operation: Operation) -> None:
        """A version read or written elsewhere."""
        if operation.sequence > self._operation.sequence:
            self._operation = operation

    async def read_again(self) -> None:
        """From the ledger, which may have to come back first."""
        stored = await self._persist(lambda: self._ledger.operations.get(self._operation.id))
        if stored is None:
            raise LetGo
        self._operation = stored

    async def is_over(self) -> bool:
        """Whether somebody else has ended it. Beside a course that writes: what is read here may
        be older by then than what this process knows, and is not put in its place."""
        stored = await self._persist(lambda: self._ledger.operations.get(self._operation.id))
        if stored is not None:
            self.learn(stored)
        return stored is None or stored.done

    async def payload(self) -> bytes | None:
        """What goes with the order; None: nothing does any more."""
        return await self._persist(lambda: self._ledger.payloads.get(self._operation.id))

    async def stages(self, after: int, limit: int) -> tuple[StoredStage, ...]:
        """Further calls that were taken on after that number."""
        return await self._persist(
            lambda: self._ledger.stages.after(self._operation.id, after, limit)
        )

    async def take(self, fact: Fact) -> Refusal | None:
        """Write it down. None: it is written. Returns only when one or the other is certain; a
        database that is away is waited for. Raises LetGo; EngineFrozen where it may not be
        dispatched now; EngineBusy where it is not the turn of one that waits for others."""
        async with self._writing:
            # One moment for all attempts: it tells the own entry from another writer's.
            at = self._clock.now()
            lost_races = 0
            while True:
                before = self._operation
                step = advance(before, fact, at)
                if isinstance(step, Rejected):
                    return step.refusal
                try:
                    await self._persist(partial(self._record, before, step, at))
                except Superseded:
                    await self.read_again()
                    if await self._is_written(step):
                        return None
                    await self.confirm_lease()
                    await asyncio.sleep(self._backoff.pause_s(lost_races))
                    lost_races += 1
                else:
                    return None

    async def _record(self, before: Operation, step: Advanced, at: datetime) -> None:
        ended = step.operation.done
        written = await self._ledger.operations.record(
            before,
            step,
            lease=self._lease(),
            audit=end_entry(step.operation, at) if ended else None,
        )
        self.learn(written)
        self.written(written)

    async def _is_written(self, step: Advanced) -> bool:
        """Whether an attempt that seemed to fail had been committed all the same."""
        if self._operation.sequence < step.operation.sequence or step.event is None:
            return False
        stored = await self._persist(
            lambda: self._ledger.events.of_operation(
                step.operation.id, after_sequence=step.operation.sequence - 1, limit=1
            )
        )
        return bool(stored) and stored[0].event == step.event

    async def _persist(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Until it is done. Only what the ledger says about the operation itself gets through."""
        tries = 0
        while True:
            try:
                done = await attempt()
                self._trouble.over()
                return done
            except (Superseded, EngineBusy, EngineFrozen):
                raise
            except Exception as error:
                tries += 1
                said = f"the ledger failed: {error!r}"
                self._trouble.seen(logging.WARNING, said, "ledger")
                await asyncio.sleep(min(self._backoff.pause_s(tries), _LONGEST_PAUSE_S))
