"""One change of what the ranks hold, as the front end carries it through; see ``change_orders``.

A caller goes rank by rank, as the administration kit's port does, but the log has one entry for all
ranks: whoever asks first about a phase writes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from app.reference_engine import adapter_orders as a
from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
from app.reference_engine.channel import Issued
from app.reference_engine.errors import OrderRejected

_R = TypeVar("_R", bound=m.Result)


@dataclass(frozen=True, slots=True)
class ChangeOutcome:
    """Per rank, in rank order. ``committed`` is the first rank's, who schedules."""

    prepared: tuple[c.ChangePrepared, ...]
    committed: c.ChangeCommitted
    settled: tuple[c.ChangeSettled, ...]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the ranks hold, as far as the front end knows. ``sha256`` of the weights per rank, empty
    strings while they are missing. ``source`` of the last update; None: the checkpoint itself.
    ``released`` says of each resource whether its content is preserved. ``adapters`` in the order
    in which they came."""

    sha256: tuple[str, ...] = ()
    source: c.DiskSource | None = None
    reloadable: bool = True
    released: Mapping[c.Resource, bool] = field(default_factory=dict)
    adapters: tuple[a.LoadedAdapter, ...] = ()

    @property
    def weights_missing(self) -> bool:
        return not all(self.sha256)

    def earlier(self) -> dict[int, m.EarlierWeights]:
        """For ranks that start again. Weights that came through memory can not be had again."""
        return {
            rank: m.EarlierWeights(source=self.source, sha256=sha256 if self.reloadable else "")
            for rank, sha256 in enumerate(self.sha256)
        }

    def after(self, order: c.Preparation, outcome: ChangeOutcome) -> Holdings:
        """Once an order is settled on every rank."""
        now = replace(self, sha256=tuple(one.weights_sha256 for one in outcome.settled))
        match order:
            case a.PrepareLoad(adapter=adapter, evict=evict):
                left = tuple(one for one in self.adapters if one.name not in evict)
                return replace(now, adapters=(*left, adapter))
            case a.PrepareUnload(name=name):
                left = tuple(one for one in self.adapters if one.name != name)
                return replace(now, adapters=left)
            case c.PrepareRelease(resources=resources, preserve=preserve):
                if c.Resource.WEIGHTS in resources and not preserve:
                    now = replace(now, adapters=())
                return replace(
                    now, released={**self.released, **dict.fromkeys(resources, preserve)}
                )
            case c.PrepareRestore(resources=resources):
                held = {one: kept for one, kept in self.released.items() if one not in resources}
                return replace(now, released=held)
            case c.PrepareUpdate(source=source):
                if isinstance(source, c.Pieces) and source.files:
                    source = c.DiskSource(source.files)
                if isinstance(source, c.DiskSource):
                    return replace(now, source=source, reloadable=True)
                return replace(now, source=None, reloadable=False)


class Change:
    """``ranks`` answer what ``issue`` writes; ``on_settled`` is told when all have settled."""

    def __init__(
        self,
        order: c.Preparation,
        ranks: tuple[int, ...],
        issue: Callable[[m.Order], Issued],
        on_settled: Callable[[c.Preparation, ChangeOutcome], None],
        *,
        prepare_deadline_s: float,
        order_deadline_s: float,
    ) -> None:
        self._order = order
        self._ranks = ranks
        self._issue = issue
        self._on_settled = on_settled
        self._prepare_deadline_s = prepare_deadline_s
        self._order_deadline_s = order_deadline_s
        self._issued: dict[str, Issued] = {}
        self._prepared: dict[int, c.ChangePrepared] = {}
        self._committed: dict[int, c.ChangeCommitted] = {}

    async def stage(self, piece: c.StagePiece, rank: int) -> c.PieceStaged:
        """One piece of an update, beside what is live; as ``prepare``, which comes after all."""
        return await self._ask(piece, rank, self._prepare_deadline_s, c.PieceStaged)

    def complete(self, order: c.Preparation) -> None:
        """What ``prepare`` is to order, now that more is known of it."""
        self._order = order

    async def prepare(self, rank: int) -> c.ChangePrepared:
        """All that takes long, beside what is live. Raises OrderRejected, with rank and tensor
        named and nothing changed, or RankLost. Cancelling it leaves the preparation running until
        ``rollback``, which stops it."""
        found = await self._ask(self._order, rank, self._prepare_deadline_s, c.ChangePrepared)
        self._prepared[rank] = found
        return found

    async def commit(self, rank: int) -> c.ChangeCommitted:
        """Takes effect between two steps. Raises OrderRejected or RankLost; also OrderRejected
        when the ranks did not all prepare from the same bytes."""
        if self._prepared.keys() != set(self._ranks):
            raise OrderRejected(rank, "not every rank has prepared")
        if len({one.read for one in self._prepared.values()}) > 1:
            raise OrderRejected(rank, "the source changed between the ranks' reading it")
        order = c.CommitChange(self._order.change_id)
        self._committed[rank] = await self._ask(
            order, rank, self._order_deadline_s, c.ChangeCommitted
        )
        return self._committed[rank]

    async def rollback(self, rank: int) -> c.ChangeUndone:
        """To the state before ``prepare``, from wherever it is; safe to ask twice. Raises
        OrderRejected when the earlier weights can not be proved, or RankLost."""
        order = c.UndoChange(self._order.change_id)
        return await self._ask(order, rank, self._order_deadline_s, c.ChangeUndone)

    async def conclude(self) -> ChangeOutcome:
        """Gives the earlier state up on all ranks. Raises OrderRejected or RankLost; a rank that
        was settled can not be rolled back any more, and refuses that where it would matter."""
        order = c.SettleChange(self._order.change_id)
        settled = await asyncio.gather(
            *(
                self._ask(order, rank, self._order_deadline_s, c.ChangeSettled)
                for rank in self._ranks
            )
        )
        outcome = ChangeOutcome(
            prepared=tuple(self._prepared[rank] for rank in self._ranks),
            committed=self._committed[self._ranks[0]],
            settled=tuple(settled),
        )
        self._on_settled(self._order, outcome)
        return outcome

    async def _ask(self, order: m.Order, rank: int, deadline_s: float, kind: type[_R]) -> _R:
        name = type(order).__name__
        if isinstance(order, c.StagePiece):
            name += f" {order.index}"
        if name not in self._issued:
            self._issued[name] = self._issue(order)
        result = await self._issued[name].ack(rank, deadline_s)
        if not isinstance(result, kind):
            raise TypeError(f"a rank answered {type(result).__name__} for {kind.__name__}")
        return result
