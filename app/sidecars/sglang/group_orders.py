"""New weights that a trainer broadcasts, in one call or in pieces.

The group is left at the end of each order, but for one that the engine joined by a call of its own:
that it leaves only when an order by it has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.domain.commands import UpdateWeights
from app.domain.operation import OperationWarning, Progress
from app.domain.tensors import TensorSpec
from app.domain.weight_sessions import Chunk, NcclChunk, NcclTransfer
from app.domain.weight_sources import DistributedWeights
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.carried import Pieces
from app.sidecars.checkpoints import specs_fit
from app.sidecars.safetensors import BadWeights
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.sglang.joining import Meeting, leave
from app.sidecars.sglang.weight_orders import Updating, unfit

_STAYS = OperationWarning(
    "GROUP_NOT_LEFT", "the engine did not leave the trainer's group: the next one needs a new name"
)


class Group(Updating):
    """`way`: where the group is, and who is in it."""

    def __init__(
        self,
        order: Order,
        command: UpdateWeights,
        engine: SglangEngine,
        way: DistributedWeights | NcclTransfer,
    ) -> None:
        super().__init__(order, command, engine)
        self.way = way
        self._meeting = Meeting(engine, way)
        self._joined = False
        self._left = True

    async def check(self) -> None:
        """Raises RuntimeFault."""
        await super().prepare()
        if self.command.check_finite:
            raise RuntimeFault(
                "TRANSFER_NOT_OFFERED",
                "what is broadcast cannot be looked at before it is loaded",
                code="INVALID_ARGUMENT",
            )
        await self._meeting.check()

    async def fit(self, specs: Sequence[TensorSpec], *, whole: bool) -> None:
        """Raises RuntimeFault."""
        try:
            await asyncio.to_thread(specs_fit, specs, self.model, whole=whole)
        except BadWeights as error:
            raise unfit(error) from error

    async def met(self) -> None:
        """Raises RuntimeFault."""
        if not self._there:
            await self._meeting.met(lambda: self.left_s)

    async def join(self) -> None:
        """Raises RuntimeFault."""
        if not self._there:
            self.order.report(Progress("joining"))
            await self._meeting.join(self.left_s)
        self._joined = True

    @property
    def _there(self) -> bool:
        """In the very same group by a call of its own."""
        return self.engine.group is not None and self.engine.group == self.way

    async def receive(self, specs: Sequence[TensorSpec]) -> None:
        """Never flushes: that comes once, at the end. Raises RuntimeFault."""
        self.size_bytes += sum(spec.size_bytes for spec in specs)
        await self.send(
            "/update_weights_from_distributed",
            {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype.value for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "group_name": self.way.group,
                "selector": self.component.value,
                "flush_cache": False,
                "abort_all_requests": False,
            },
        )

    async def end(self) -> None:
        """The update is whole. Raises RuntimeFault."""
        await self.complete()
        if not self._there:
            self._left = await self._leave()

    async def undo(self) -> None:
        if self._joined:
            await self._leave()
        await super().undo()

    async def _leave(self) -> bool:
        try:
            await leave(self.engine, self.way.group)
        except RuntimeFault:
            return False
        self._joined = False
        return True

    async def conclude(self) -> Conclusion:
        concluded = await super().conclude()
        if self._left:
            return concluded
        return Conclusion(
            evidence=concluded.evidence,
            flushed=concluded.flushed,
            warnings=(*concluded.warnings, _STAYS),
        )


class CarriedBroadcast(Group):
    """Of all tensors in one call."""

    def __init__(
        self, order: Order, command: UpdateWeights, engine: SglangEngine, way: DistributedWeights
    ) -> None:
        super().__init__(order, command, engine, way)
        self._specs = way.tensors

    async def prepare(self) -> None:
        await self.check()
        await self.fit(self._specs, whole=self.order.replace_all)
        await self.met()

    async def commit(self) -> None:
        await self.closed()
        self.sent = True
        await self.join()
        await self.begin()
        await self.receive(self._specs)
        await self.end()


class CarriedSession(Group):
    """In pieces, under a pause of the caller's: each is in the model as soon as it has come."""

    def __init__(
        self, order: Order, command: UpdateWeights, engine: SglangEngine, way: NcclTransfer
    ) -> None:
        super().__init__(order, command, engine, way)
        self.pieces = Pieces(self._begin, self._take)
        self._specs: list[TensorSpec] = []

    async def _begin(self) -> None:
        self.engine.belief.may_update()
        await self.check()
        await self.met()
        await self.closed()
        self.sent = True
        await self.join()
        await self.begin()

    async def _take(self, chunk: Chunk) -> None:
        payload = chunk.payload
        assert isinstance(payload, NcclChunk)  # the kit has compared it with the session
        if payload.packed:
            raise RuntimeFault(
                "PACKED_NOT_OFFERED", "send each tensor by itself", code="INVALID_ARGUMENT"
            )
        await self.fit(payload.tensors, whole=False)
        self._specs += payload.tensors
        await self.receive(payload.tensors)

    async def prepare(self) -> None:
        """All pieces are there, and in the model."""
        await self.fit(self._specs, whole=self.order.replace_all)

    async def commit(self) -> None:
        await self.end()
