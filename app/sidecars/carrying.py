"""The kit's port over an engine whose calls go to all of its ranks at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from app.domain.weight_sessions import Chunk
from app.enginekit.runtime import Conclusion, Load, Observation, Order, RankLoad, RuntimeFault
from app.sidecars.carried import Carried, Pieces
from app.sidecars.watching import Orders, Watch


def summed(ranks: tuple[RankLoad, ...]) -> Load:
    """Of an engine that tells its load by rank alone."""
    return Load(
        running_requests=sum(rank.running_requests for rank in ranks),
        queued_requests=sum(rank.queued_requests for rank in ranks),
        used_kv_blocks=sum(rank.used_kv_blocks for rank in ranks),
        total_kv_blocks=sum(rank.total_kv_blocks for rank in ranks),
        ranks=ranks,
    )


class CarryingRuntime(ABC):
    """The four methods by which orders come, for ``app.enginekit.runtime.Runtime``: each phase is
    carried out once for all ranks. `harmless`: whose failure says nothing about the weights."""

    harmless: tuple[type[Carried], ...] = ()

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._carried: dict[str, Carried] = {}
        self._begun = 0

    @abstractmethod
    def made(self, order: Order) -> Carried:
        """Raises RuntimeFault."""

    async def observe(self) -> Observation:
        return await self._watch.observe(self._orders)

    def _orders(self) -> Orders:
        under_way = any(not carried.over for carried in self._carried.values())
        return Orders(begun=self._begun, under_way=under_way)

    async def open_piecewise(self, order: Order) -> None:
        """Raises RuntimeFault."""
        await self._pieces(order).opened()

    async def stage_piece(self, order: Order, chunk: Chunk) -> None:
        """Raises RuntimeFault."""
        await self._pieces(order).staged(chunk)

    def _pieces(self, order: Order) -> Pieces:
        pieces = self.carried(order).pieces
        if pieces is None:
            raise RuntimeFault("INTERNAL", "the order does not come in pieces")
        return pieces

    async def prepare(self, order: Order, rank: int) -> None:
        await self.carried(order).prepared()

    async def commit(self, order: Order, rank: int) -> None:
        await self.carried(order).committed()

    async def rollback(self, order: Order, rank: int) -> None:
        carried = self.carried(order)
        try:
            await carried.rolled_back()
        except BaseException:  # being cancelled too: then the engine did not answer in time
            if isinstance(carried, self.harmless):
                self._watch.doubt()
            raise
        finally:
            self._watch.look_again()

    async def conclude(self, order: Order) -> Conclusion:
        concluded = await self.carried(order).concluded()
        self._carried.pop(order.operation_id, None)
        return concluded

    def carried(self, order: Order) -> Carried:
        carried = self._carried.get(order.operation_id)
        if carried is None:
            over = [name for name, one in self._carried.items() if one.over]
            for name in over:
                del self._carried[name]
            self._begun += 1
            carried = self._carried[order.operation_id] = self.made(order)
        return carried

    async def close(self) -> None:
        """The client stays its maker's: the next life of the engine uses it too."""
        for carried in self._carried.values():
            await carried.close()
