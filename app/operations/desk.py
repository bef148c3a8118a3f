"""One engine's orders in this process: driven while the engine's lease is held here."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Iterable
from typing import cast

from app.backends.telling import Trouble
from app.clock import Clock
from app.domain.errors import UnknownEngine
from app.domain.operation import Operation
from app.ledger.ledger import Ledger
from app.ledger.values import Lease
from app.observability.tracing import of_operation
from app.operations.backoff import Backoff
from app.operations.course import Course
from app.operations.fleet import Fleet
from app.operations.logbook import LetGo, Logbook
from app.operations.pace import Pace
from app.operations.watched import NOWHERE, Origin, Watched

log = logging.getLogger(__name__)


class Desk:
    """At work as long as there is something open. One task per operation, one for the lease.

    Whoever holds the lease drives all of the engine's open operations, also those that another
    gateway accepted: an abort must not wait for the drain that it is meant to end.
    """

    def __init__(
        self,
        engine_id: str,
        ledger: Ledger,
        fleet: Fleet,
        clock: Clock,
        *,
        owner: str,
        pace: Pace,
        backoff: Backoff,
        watched: Watched,
    ) -> None:
        self._engine_id = engine_id
        self._ledger = ledger
        self._fleet = fleet
        self._clock = clock
        self._owner = owner
        self._pace = pace
        self._backoff = backoff
        self._watched = watched
        self._origins: dict[str, Origin] = {}
        self._open: dict[str, Operation] = {}
        self._courses: dict[str, tuple[Course, asyncio.Task[None]]] = {}
        self._trouble = Trouble(log, f"engine {engine_id}")
        self._lease: Lease | None = None
        self._lost = False
        self._stopping = False
        self._wake = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    def known(self) -> dict[str, int]:
        """What is open here, and the sequence to which it is known."""
        heard = {name: course.operation.sequence for name, (course, _) in self._courses.items()}
        return {name: each.sequence for name, each in self._open.items()} | heard

    @property
    def idle(self) -> bool:
        return self._work is None or self._work.done()

    def offer(
        self,
        operations: Iterable[Operation],
        gone: Iterable[str] = (),
        *,
        origin: Origin = NOWHERE,
    ) -> None:
        """These are as the ledger has just said, and those are no longer open. `origin`: of them
        all, where it is known."""
        if self._stopping:
            return
        for operation in operations:
            course = self._courses.get(operation.id)
            if course is not None:
                course[0].notice(operation)
            elif operation.done:
                self._forget(operation.id)
                continue
            self._open[operation.id] = operation
            if origin is not NOWHERE:
                self._origins[operation.id] = origin
        for operation_id in gone:
            if operation_id not in self._courses:
                self._forget(operation_id)
            else:
                self._courses[operation_id][0].doubt()
        self._wake.set()
        if self._open and self.idle:
            # Not in the context of the request that happens to be the first: what follows for
            # others would be told as its.
            loop = asyncio.get_running_loop()
            self._work = loop.create_task(self._run(), context=contextvars.Context())

    async def stop(self) -> None:
        """Detach. What is being written is written to its end."""
        self._stopping = True
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._open:
                await self._hold()
        except UnknownEngine:
            log.error("engine %s has open operations and is not registered", self._engine_id)
            self._open.clear()
        except Exception:
            # What is open is offered again by the next sweep, and the work begins anew.
            log.exception("engine %s: its orders are not driven for the moment", self._engine_id)

    async def _hold(self) -> None:
        """Take the lease, and drive as long as it holds and there is something to drive."""
        lease = await self._acquire()
        if lease is None:
            # Another gateway drives this engine, and will see what is open. If it is gone its
            # lease runs out.
            await self._sleep(self._pace.sweep_s)
            return
        self._lease, self._lost = lease, False
        self._watched.metrics.lease_taken(over=bool(lease.taken_from))
        try:
            await self._drive()
        finally:
            self._watched.metrics.lease_ended(lost=self._lost)
            await self._let_go()

    async def _acquire(self) -> Lease | None:
        """Raises UnknownEngine."""
        acquiring = asyncio.ensure_future(
            self._ledger.leases.acquire(self._engine_id, self._owner, self._pace.lease_ttl_s)
        )
        try:
            lease = await asyncio.shield(acquiring)
            self._trouble.over()
            return lease
        except asyncio.CancelledError:
            # The write goes on all the same. A lease that nobody knows of would keep every
            # gateway away until it runs out.
            with contextlib.suppress(Exception):
                lease = await acquiring
                if lease is not None:
                    await self._ledger.leases.release(lease)
            raise
        except UnknownEngine:
            raise
        except Exception as error:
            self._trouble.seen(logging.WARNING, f"no lease, the ledger failed: {error!r}", "lease")
            return None

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + self._pace.lease_ttl_s / 3
        while self._open and not self._lost:
            for operation in list(self._open.values()):
                if operation.id not in self._courses:
                    self._begin(operation)
            await self._call_next()
            await self._sleep(renew_at - loop.time())
            if loop.time() >= renew_at and not self._lost:
                with contextlib.suppress(Exception):
                    # A database that is away takes no writes from anybody. When it is back it
                    # says whose lease it is.
                    await self._still_ours()
                renew_at = loop.time() + self._pace.lease_ttl_s / 3

    async def _call_next(self) -> None:
        """Tell the first of those that wait when the slot seems to be free: after an end, after
        each sweep, whoever has let go of it or has come."""
        waiting = {
            course.operation.id: course
            for course, _ in self._courses.values()
            if course.waits_for_others
        }
        if not waiting:
            return
        try:
            line = await self._ledger.operations.line(self._engine_id)
        except Exception as error:
            self._trouble.seen(
                logging.WARNING, f"whose turn it is cannot be read: {error!r}", "turn"
            )
            return
        self._trouble.over()
        if line.next in waiting:
            waiting[line.next].call_up()

    def _begin(self, operation: Operation) -> None:
        logbook = Logbook(
            self._ledger,
            operation,
            self._clock,
            self._backoff,
            lease=lambda: cast("Lease", self._lease),
            still_ours=self._still_ours,
        )
        course = Course(
            logbook,
            self._fleet,
            self._clock,
            self._pace,
            self._backoff,
            self._watched,
            self._origins.get(operation.id, NOWHERE),
        )
        task = asyncio.get_running_loop().create_task(course.run())
        self._courses[operation.id] = (course, task)
        task.add_done_callback(lambda done: self._finished(operation.id, done))

    def _finished(self, operation_id: str, task: asyncio.Task[None]) -> None:
        # Also after a fault: if it is still open the next sweep brings it back, which keeps a
        # fault that repeats itself from spinning.
        course, _ = self._courses.pop(operation_id)
        origin = self._origins.get(operation_id, NOWHERE)
        self._forget(operation_id)
        self._wake.set()
        if task.cancelled():
            return
        error = task.exception()
        with of_operation(course.operation, origin.request_id):
            if isinstance(error, LetGo):
                log.warning("operation %s is driven by another gateway now", operation_id)
            elif error is not None:
                log.error("operation %s: its course failed", operation_id, exc_info=error)

    def _forget(self, operation_id: str) -> None:
        self._open.pop(operation_id, None)
        self._origins.pop(operation_id, None)

    async def _still_ours(self) -> bool:
        """Renews the lease. Raises what the ledger raises when it cannot say."""
        if self._lease is None or self._lost:
            return False
        renewed = await self._ledger.leases.renew(self._lease, self._pace.lease_ttl_s)
        if renewed is None:
            self._lost = True
            self._wake.set()
            return False
        self._lease = renewed
        return True

    async def _let_go(self) -> None:
        """First the courses end, then the lease is given back: never the other way round."""
        tasks = [task for _, task in self._courses.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lease, self._lease = self._lease, None
        if lease is not None and not self._lost:
            try:
                await self._ledger.leases.release(lease)
            except Exception as error:
                log.warning("engine %s: its lease runs out by itself: %r", self._engine_id, error)

    async def _sleep(self, seconds: float) -> None:
        """Until there is news."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
        self._wake.clear()
