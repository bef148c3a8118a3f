"""An update of weights that come in pieces, between the kit's port and the core."""

from __future__ import annotations

from app.domain.commands import UpdateWeights
from app.domain.kinds import CachePolicy
from app.domain.weight_sessions import Chunk, SessionWeights
from app.enginekit.runtime import Order
from app.reference_engine import change_orders as c
from app.reference_engine.carried_change import CarriedChange
from app.reference_engine.engine import Engine
from app.reference_engine.pieces import PieceSourcing
from app.reference_engine.sources import SourcePolicy


class PiecedChange(CarriedChange):
    """As any update from the moment when all pieces are staged."""

    def __init__(
        self,
        order: Order,
        command: UpdateWeights,
        session: SessionWeights,
        engine: Engine,
        policy: SourcePolicy,
    ) -> None:
        """``session`` is the command's source, and that the order's."""
        super().__init__(order, command, engine, policy)
        self._check_finite = command.check_finite
        self._flush = command.cache_policy is CachePolicy.FLUSH
        self._pieces = PieceSourcing(session, order, engine, policy)

    async def open(self, rank: int) -> None:
        """Raises RuntimeFault."""
        await self._pieces.open(rank)

    async def stage(self, rank: int, chunk: Chunk) -> None:
        """Raises RuntimeFault, with nothing changed."""
        piece = c.StagePiece(
            change_id=self.operation_id,
            index=chunk.index,
            sources=await self._pieces.of(chunk, rank),
            check_finite=self._check_finite,
        )
        if self._change is None:
            self._change = self.group.change(self._whole(()))
        await self._answer(self._change.stage(piece, rank))

    async def prepare(self, rank: int) -> None:
        if self._change is not None:
            self._change.complete(self._whole(self._pieces.files))
        await super().prepare(rank)

    async def discard(self) -> None:
        await self._pieces.discard()

    async def _preparation(self, rank: int) -> c.Preparation:
        del rank  # the same for all
        return self._whole(self._pieces.files)

    def _whole(self, files: tuple[c.WeightFile, ...]) -> c.PrepareUpdate:
        return c.PrepareUpdate(
            change_id=self.operation_id,
            source=c.Pieces(files),
            flush=self._flush,
            check_finite=self._check_finite,
        )
