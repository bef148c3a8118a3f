"""A reconfiguration of the ranks, between the kit's port and their groups.

Limits change in the ranks that are there: their KV and prefix caches stay. For another number of
ranks a whole other group is started beside them, from the weights that they serve; they stay what
they are until it is proved and takes over, so that a failure at any point leaves them as they were.
Its caches are empty. For that time there are two copies of the weights, and a third in host memory
while the new ranks read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from app.domain.commands import ReconfigureServing
from app.domain.kinds import CacheKind, ReconfigurableField
from app.domain.operation import Progress
from app.enginekit.runtime import Conclusion, Flushed, Order, RuntimeFault
from app.reference_engine import messages as m
from app.reference_engine.carried_change import fault_of
from app.reference_engine.channel import Issued
from app.reference_engine.engine import Engine
from app.reference_engine.errors import (
    OrderRejected,
    RankLost,
    ReferenceEngineError,
    UnsupportedArchitecture,
)
from app.reference_engine.generating import Generating
from app.reference_engine.group import Group
from app.reference_engine.limits import CoreSettings
from app.reference_engine.shape_orders import SetLimits
from app.reference_engine.sharding import Layout

T = TypeVar("T")

FIELDS = frozenset(
    {
        ReconfigurableField.ROLE,
        ReconfigurableField.TENSOR_PARALLEL_SIZE,
        ReconfigurableField.MAX_RUNNING_REQUESTS,
        ReconfigurableField.MAX_BATCHED_TOKENS,
    }
)


class Reshaping:
    """One order's way. The kit goes rank by rank, over the ranks that were there before; whoever
    asks first about a phase begins it for all."""

    def __init__(
        self,
        order: Order,
        command: ReconfigureServing,
        engine: Engine,
        gate: Callable[[], m.Gate],
        generating: Generating,
    ) -> None:
        """``command`` is the order's, ``gate`` what the new ranks' gate has to be. ``generating``
        has the role, which is the front end's alone."""
        self.operation_id = order.operation_id
        self.group = engine.group  # the order ends with it
        self._command = command
        self._report = order.report
        self._engine = engine
        self._gate = gate
        self._generating = generating
        self._starting: asyncio.Task[Group] | None = None
        self._proving: asyncio.Task[m.Result] | None = None
        self._undoing: asyncio.Task[None] | None = None
        self._issued: dict[str, Issued] = {}
        self._before = self.group.settings
        self._taken = False

    async def prepare(self, rank: int) -> None:
        """Raises RuntimeFault, with nothing changed."""
        wanted = self._wanted()
        await self._generating.prepare(self._command.role)
        if not self._other_ranks(wanted):
            await self._ask("prepare", m.ReadLoad(), rank)
            return
        if self._engine.open_requests:
            raise RuntimeFault("REQUESTS_IN_FLIGHT", "requests are in flight", retryable=True)
        if self._starting is None:
            size = wanted.tensor_parallel_size
            self._report(Progress("starting_ranks", 0, size, "ranks"))
            self._starting = _begin(self._engine.beside(wanted, self._gate))
        try:
            await self._unless_lost(self._starting)
        except ReferenceEngineError as error:
            raise self._fault(error) from error
        size = wanted.tensor_parallel_size
        self._report(Progress("starting_ranks", size, size, "ranks"))

    async def commit(self, rank: int) -> None:
        """Limits hold from here on. Of new ranks it is proved that they compute together."""
        wanted = self._wanted()
        if not self._other_ranks(wanted):
            await self._ask("commit", _limits(wanted), rank)
            return
        if self._proving is None:
            self._proving = _begin(self._new().order(m.Probe()))
        try:
            await self._unless_lost(self._proving)
        except ReferenceEngineError as error:
            raise self._fault(error) from error

    async def rollback(self, rank: int) -> None:
        """The earlier ranks never were anything else; raises where they are no longer there."""
        if self._undoing is None:
            self._undoing = asyncio.create_task(self._end_new())
        await asyncio.shield(self._undoing)
        if "commit" in self._issued:
            await self._ask("rollback", _limits(self._before), rank)
        try:
            self.group.check_whole()
        except RankLost as error:
            raise fault_of(error) from error

    async def conclude(self) -> Conclusion:
        wanted = self._wanted()
        try:
            self.group.check_whole()
            if not self._other_ranks(wanted):
                self.group.settings = wanted
                self._generating.take_role(self._command.role)
                return Conclusion()
            new = self._new()
            new.check_whole()
        except RankLost as error:
            raise fault_of(error) from error
        # Nothing is waited for from the last look on: what took over is whole, or is lost by its
        # own fault and comes back in its own shape.
        self._engine.take_over(new)
        self._taken = True
        self._generating.take_role(self._command.role)
        return Conclusion(flushed=(Flushed(CacheKind.PREFIX, 0, 0),))

    async def discard(self) -> None:
        """Ranks that were started and not taken over end with the engine."""
        if not self._taken:
            await self._end_new()

    def _wanted(self) -> CoreSettings:
        """Raises RuntimeFault for a shape that this model, or these limits, do not allow."""
        command, now = self._command, self._before
        size = command.tensor_parallel_size or now.tensor_parallel_size
        try:
            Layout(self._engine.config, 0, size)
            return replace(
                now,
                tensor_parallel_size=size,
                max_running=command.max_running_requests or now.max_running,
                max_batched_tokens=command.max_batched_tokens or now.max_batched_tokens,
            )
        except (UnsupportedArchitecture, ValueError) as error:
            cause = str(error)
            raise RuntimeFault("SHAPE_NOT_POSSIBLE", cause, code="INVALID_ARGUMENT") from error

    def _other_ranks(self, wanted: CoreSettings) -> bool:
        return wanted.tensor_parallel_size != self._before.tensor_parallel_size

    def _new(self) -> Group:
        if self._starting is None or not self._starting.done():
            raise RuntimeFault("INTERNAL", "the order was not prepared")
        return self._starting.result()

    async def _ask(self, phase: str, order: m.Order, rank: int) -> None:
        if phase not in self._issued:
            self._issued[phase] = self.group.issue(order)
        try:
            await self.group.ack(self._issued[phase], rank)
        except (RankLost, OrderRejected) as error:
            raise fault_of(error) from error

    async def _unless_lost(self, work: asyncio.Task[T]) -> T:
        """Shielded: one rank's step may be cancelled, and the others go on. Raises RankLost as soon
        as the ranks that are there are lost, whatever becomes of the new ones."""
        lost = asyncio.ensure_future(self.group.until_lost())
        try:
            await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        self.group.check_whole()
        return work.result()

    def _fault(self, error: ReferenceEngineError) -> RuntimeFault:
        if isinstance(error, OrderRejected) or (isinstance(error, RankLost) and self.group.lost):
            return fault_of(error)
        return RuntimeFault("RANKS_NOT_STARTED", f"of the new ranks: {error}", retryable=True)

    async def _end_new(self) -> None:
        for task in (self._proving, self._starting):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        started = self._starting
        if started is not None and not started.cancelled() and started.exception() is None:
            await started.result().close(kill=True)


def _begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.create_task(work)
    # Whoever waited for it may be gone: an error that nobody reads is not worth a warning.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _limits(settings: CoreSettings) -> SetLimits:
    return SetLimits(
        max_running=settings.max_running, max_batched_tokens=settings.max_batched_tokens
    )
