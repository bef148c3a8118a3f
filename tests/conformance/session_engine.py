"""The complete engine, which also takes weights in pieces: files, and shared memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from app.conformance.tensors import Weights, parsed
from app.domain.commands import UpdateWeights
from app.domain.kinds import WeightSourceKind, WeightTransferBackend
from app.domain.weight_sessions import Chunk, DiskChunk, DiskTransfer, IpcChunk, SessionWeights
from app.domain.weight_sources import SharedMemoryTensor, SharedMemoryWeights, WeightSource
from app.enginekit.runtime import Order, RuntimeFault
from tests.conformance.complete_engine import CompleteEngine


class PiecewiseEngine(CompleteEngine):
    """`pieces`: what each rank has staged of an order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pieces: dict[tuple[str, int], Weights] = {}
        self._preparing = ("", 0)
        self.offered = replace(
            self.offered,
            weight_sources=self.offered.weight_sources | {WeightSourceKind.SESSION},
            weight_sessions=frozenset({WeightTransferBackend.DISK, WeightTransferBackend.IPC}),
        )

    async def open_session(self, order: Order, rank: int) -> None:
        self.pieces[order.operation_id, rank] = ()

    async def stage_chunk(self, order: Order, rank: int, chunk: Chunk) -> None:
        assert isinstance(order.command, UpdateWeights)
        assert isinstance(order.command.source, SessionWeights)
        self.pieces[order.operation_id, rank] += self.piece(order.command.source, chunk)

    async def prepare(self, order: Order, rank: int) -> None:
        self._preparing = order.operation_id, rank
        await super().prepare(order, rank)

    async def rollback(self, order: Order, rank: int) -> None:
        await super().rollback(order, rank)
        self.pieces.pop((order.operation_id, rank), None)

    def read(self, source: WeightSource) -> Weights:
        if isinstance(source, SessionWeights):
            return self.pieces[self._preparing]
        return super().read(source)

    def piece(self, session: SessionWeights, chunk: Chunk) -> Weights:
        match session.transfer, chunk.payload:
            case DiskTransfer(path=path), DiskChunk(files=files):
                return tuple(
                    tensor for file in files for tensor in self._file(PurePosixPath(path) / file)
                )
            case _, IpcChunk() as shared:
                return self._shared(shared)
        raise RuntimeFault("SOURCE_REFUSED", "not by that way")

    def _file(self, path: PurePosixPath) -> Weights:
        if not path.is_relative_to(self.root.as_posix()):
            raise RuntimeFault("SOURCE_REFUSED", "not below an allowed root")
        return tuple(parsed((self.root / path).read_bytes()))

    def _shared(self, chunk: IpcChunk) -> Weights:
        found: Weights = ()
        for index, spec in enumerate(chunk.tensors):
            (handle,) = chunk.of_tensor(index)
            found += self.from_memory(
                SharedMemoryWeights(
                    object_name=handle.handle.decode(),
                    size_bytes=handle.offset_bytes + spec.size_bytes,
                    tensors=(SharedMemoryTensor(spec, handle.offset_bytes),),
                )
            )
        return found
