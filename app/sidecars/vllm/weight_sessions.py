"""New weights that a trainer broadcasts, in pieces.

A broadcast needs the engine to take part while it is sent, and vLLM writes what it receives into
the model at once. So a session is begun under a pause of the caller's, and from then on there is no
way back: one that is called off leaves weights that only a whole update makes right again.
"""

from __future__ import annotations

import asyncio

from app.domain.commands import UpdateWeights
from app.domain.kinds import CollectiveBackend
from app.domain.weight_sessions import Chunk, NcclChunk, NcclTransfer
from app.enginekit.rendezvous import RendezvousRefused, resolved
from app.enginekit.runtime import Order, RuntimeFault
from app.sidecars.carried import Pieces
from app.sidecars.vllm.engine import VllmEngine
from app.sidecars.vllm.weight_orders import Updating


class CarriedSession(Updating):
    def __init__(
        self, order: Order, command: UpdateWeights, engine: VllmEngine, way: NcclTransfer
    ) -> None:
        super().__init__(order, command, engine)
        self._way = way
        self.pieces = Pieces(self._begin, self._take)

    async def _begin(self) -> None:
        await super().prepare()
        way = self._way
        if way.backend is not CollectiveBackend.NCCL or way.source_rank or way.group:
            raise RuntimeFault(
                "TRANSFER_NOT_OFFERED",
                "the engine joins by NCCL, receives from rank 0, and names no group",
                code="INVALID_ARGUMENT",
            )
        # Before the trainer is met, who would wait for an engine that must not receive.
        self._engine.belief.may_start_update()
        rules = self._engine.allowed.rendezvous
        try:
            address = await asyncio.to_thread(resolved, rules, way.address, way.port)
        except RendezvousRefused as refused:
            raise RuntimeFault(
                "RENDEZVOUS_NOT_ALLOWED", str(refused), code="INVALID_ARGUMENT"
            ) from refused
        await self.initialise(
            {
                "master_address": address,
                "master_port": way.port,
                "rank_offset": way.rank_offset,
                "world_size": way.world_size,
            }
        )
        await self.begin()

    async def _take(self, chunk: Chunk) -> None:
        payload = chunk.payload
        assert isinstance(payload, NcclChunk)  # the kit has compared it with the session
        if payload.packed:
            raise RuntimeFault(
                "PACKED_NOT_OFFERED", "send each tensor by itself", code="INVALID_ARGUMENT"
            )
        specs = payload.tensors
        self._size_bytes += sum(spec.size_bytes for spec in specs)
        await self.piece(
            {
                "names": [spec.name for spec in specs],
                "dtype_names": [spec.dtype.value for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
            }
        )

    async def prepare(self) -> None:
        """All pieces are there, and in the model."""

    async def commit(self) -> None:
        await self.finish()
        if self._engine.found.has("/shutdown_weight_transfer_engine"):
            # The next session meets its trainer anew.
            await self._engine.post("/shutdown_weight_transfer_engine")
