"""One group of ranks that serve together, from their start to their end, and what they hold.

An engine has one at a time. Whoever carries an order through several steps keeps the group with
which it began: what one group prepared means nothing to the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
from app.reference_engine.adapter_orders import LoadedAdapter, PrepareLoad
from app.reference_engine.cache_changes import CacheChanged
from app.reference_engine.change import Change, ChangeOutcome, Holdings
from app.reference_engine.channel import Issued
from app.reference_engine.errors import OrderRejected, RankLost
from app.reference_engine.limits import CoreSettings
from app.reference_engine.memory_file import memory_files
from app.reference_engine.nursery import Nursery
from app.reference_engine.shape_orders import LiveWeights, WriteWeights
from app.reference_engine.supervisor import Supervisor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStart:
    """What all groups of one engine have in common. ``deadlines``: those of `Supervisor.start`."""

    checkpoint: Path
    deadlines: Mapping[str, float]
    nursery: Nursery


class Group:
    """A lost group stays lost. Lives on one event loop."""

    def __init__(self, settings: CoreSettings, number: int) -> None:
        """``settings`` is the shape in which the ranks serve; limits may change. ``number`` tells
        this group from all others of the engine's life."""
        self.settings = settings
        self.number = number
        self.holdings = Holdings()
        self.on_report: Callable[[m.RequestReport], None]
        self.on_cache: Callable[[CacheChanged], None]
        self.on_lost: Callable[[int, str], None]
        self.dismiss()
        self._supervisor: Supervisor
        self._down = asyncio.Event()
        self._sealed = False

    @classmethod
    async def start(
        cls,
        common: GroupStart,
        settings: CoreSettings,
        number: int,
        earlier: Mapping[int, m.FirstWeights] | None = None,
    ) -> Group:
        """Every rank or none; they hold the checkpoint's weights, or those of ``earlier`` as far as
        these can be had. Raises StartupFailed."""
        group = cls(settings, number)
        group._supervisor = await Supervisor.start(
            common.checkpoint,
            settings,
            on_report=lambda report: group.on_report(report),
            on_cache=lambda changed: group.on_cache(changed),
            on_lost=group._lost,
            earlier=earlier,
            nursery=common.nursery,
            **common.deadlines,
        )
        sums = tuple(one.weights_sha256 for one in group._supervisor.ready)
        group.holdings = Holdings(sha256=sums)
        return group

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._supervisor.log.ranks

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that are gone, with the cause: none or all."""
        return self._supervisor.log.lost

    @property
    def blamed(self) -> tuple[int, ...]:
        """Of the lost ranks those that were the reason."""
        return self._supervisor.blamed

    @property
    def ready(self) -> tuple[m.Ready, ...]:
        """What each rank reported at its start, in rank order."""
        return self._supervisor.ready

    def dismiss(self) -> None:
        """Nobody hears of it any more, or not yet."""
        self.on_report = lambda _report: None
        self.on_cache = lambda _changed: None
        self.on_lost = lambda _rank, _cause: None

    async def until_lost(self) -> None:
        """Returns at once when it is lost already; never for a group that is closed in order."""
        await self._down.wait()

    def give_up(self, rank: int, cause: str) -> None:
        """Nobody can say any more what that rank holds: the group ends here."""
        self._supervisor.give_up(rank, cause)

    def issue(self, order: m.Order) -> Issued:
        """Put an order in the log for all ranks; for callers that follow each rank themselves."""
        return self._supervisor.log.issue(order)

    async def ack(self, issued: Issued, rank: int) -> m.Result:
        """One rank's answer within the order deadline. Raises OrderRejected or RankLost."""
        return await issued.ack(rank, self._supervisor.order_deadline_s)

    async def order(self, order: m.Order) -> m.Result:
        """Carry an order out on all ranks; the first rank's result stands for all."""
        return (await self.results(order))[0]

    async def results(self, order: m.Order) -> list[m.Result]:
        """The same, with what each rank answered, in rank order."""
        issued = self.issue(order)
        return await asyncio.gather(*(self.ack(issued, rank) for rank in self.ranks))

    def change(self, order: c.Preparation, *, prepare_deadline_s: float = 1800.0) -> Change:
        """Begin a release, a restore or an update of weights. Nothing is sent before the first
        call of ``prepare``. One at a time: it has to be concluded or rolled back on every rank."""
        return Change(
            order,
            self.ranks,
            self.issue,
            self._changed,
            prepare_deadline_s=prepare_deadline_s,
            order_deadline_s=self._supervisor.order_deadline_s,
        )

    async def carry_out(self, order: c.Preparation) -> ChangeOutcome:
        """A change on all ranks, all phases; rolled back when a rank refuses. Raises OrderRejected
        with nothing changed, or RankLost."""
        change = self.change(order)
        try:
            await asyncio.gather(*(change.prepare(rank) for rank in self.ranks))
            await asyncio.gather(*(change.commit(rank) for rank in self.ranks))
        except OrderRejected:
            await asyncio.gather(*(change.rollback(rank) for rank in self.ranks))
            raise
        return await change.conclude()

    def seal(self) -> Holdings:
        """What it held, for the next group to go on from. From here on no order of a lost group
        counts as settled."""
        self._sealed = True
        return self.holdings

    @asynccontextmanager
    async def live_weights(self, deadline_s: float = 1800.0) -> AsyncIterator[LiveWeights]:
        """What the ranks serve, in memory of its own for the time of the block. Raises
        OrderRejected where that is not what was committed, RankLost, or OSError."""
        with memory_files(len(self.ranks)) as paths:
            issued = self.issue(WriteWeights(paths))
            await asyncio.gather(*(issued.ack(rank, deadline_s) for rank in self.ranks))
            yield LiveWeights(paths, self.holdings.sha256)

    async def set_up_like(self, before: Holdings, *, all_of_it: bool = False) -> None:
        """Bring the ranks of a group that has just started to one state: the earlier one, as far as
        it can be had, or ``all_of_it``. Raises RankLost or OrderRejected; then it serves
        nothing."""
        sums = tuple(one.weights_sha256 for one in self.ready)
        self.holdings = replace(before, sha256=sums, released={}, adapters=())
        if not all(sums):
            # Some may have found theirs: a part of a model is nothing.
            await self._release({c.Resource.WEIGHTS: False})
            order = c.PrepareRestore(change_id=uuid4().hex, resources=(c.Resource.WEIGHTS,))
            await self.carry_out(order)
        else:
            await self._load_again(before.adapters, all_of_it=all_of_it)
        await self._release(before.released)

    async def follow_gate(self, wanted: Callable[[], m.Gate]) -> None:
        """Of a group that has just started. When it returns the gate is what is wanted then."""
        gate = m.Gate.OPEN
        while gate is not (target := wanted()):
            await self.order(m.SetGate(gate=target))
            gate = target
        self.check_whole()

    def check_whole(self) -> None:
        """Raises RankLost."""
        if lost := self.lost:
            ranks = self.blamed or tuple(lost)
            raise RankLost(ranks, lost[ranks[0]])

    async def close(self, *, kill: bool = False) -> None:
        """See :meth:`Supervisor.close`."""
        await self._supervisor.close(kill=kill)

    async def _load_again(self, adapters: tuple[LoadedAdapter, ...], *, all_of_it: bool) -> None:
        """Those whose files are still there, and what they were."""
        for adapter in adapters:
            try:
                await self.carry_out(PrepareLoad(change_id=uuid4().hex, adapter=adapter))
            except OrderRejected as error:
                if all_of_it:
                    raise
                log.warning("adapter %r is lost with the ranks: %s", adapter.name, error)

    async def _release(self, resources: Mapping[c.Resource, bool]) -> None:
        for resource, preserve in resources.items():
            await self.carry_out(
                c.PrepareRelease(change_id=uuid4().hex, resources=(resource,), preserve=preserve)
            )

    def _changed(self, order: c.Preparation, outcome: ChangeOutcome) -> None:
        if self._sealed:
            self.check_whole()
        self.holdings = self.holdings.after(order, outcome)

    def _lost(self, rank: int, cause: str) -> None:
        self._down.set()
        self.on_lost(rank, cause)
