"""The scripted engine that also takes weights in pieces, and the calls of a client that sends them.

What a rank has staged of an order stands in `staged`, until the order is committed or rolled back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.domain.commands import UpdateWeights
from app.domain.kinds import WeightTransferBackend
from app.domain.weight_sessions import Chunk, DiskChunk, SessionWeights
from app.enginekit.runtime import Order, RuntimeFault
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.enginekit.client import Client, Event, Observing
from tests.enginekit.full_engine import FullEngine

COMPLETE = "complete"
"""Among the files of a session, the one without which its pieces are no whole."""


class SessionEngine(FullEngine):
    """Phases of its own for scripts: `open`, `stage`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.staged: dict[tuple[str, int], list[int]] = {}
        self.files: dict[tuple[str, int], set[str]] = {}
        backends = frozenset({WeightTransferBackend.DISK, WeightTransferBackend.NCCL})
        self.offered = replace(self.offered, weight_sessions=backends)

    async def open_session(self, order: Order, rank: int) -> None:
        await self._step("open", order, rank)
        self.staged[order.operation_id, rank] = []
        self.files[order.operation_id, rank] = set()

    async def stage_chunk(self, order: Order, rank: int, chunk: Chunk) -> None:
        await self._step("stage", order, rank)
        self.staged[order.operation_id, rank].append(chunk.index)
        if isinstance(chunk.payload, DiskChunk):
            self.files[order.operation_id, rank] |= set(chunk.payload.files)

    async def prepare(self, order: Order, rank: int) -> None:
        await super().prepare(order, rank)
        match order.command:
            case UpdateWeights(source=SessionWeights()):
                if COMPLETE not in self.files[order.operation_id, rank]:
                    raise RuntimeFault("TENSOR_MISSING", f"rank {rank} misses a tensor")

    async def rollback(self, order: Order, rank: int) -> None:
        await super().rollback(order, rank)
        self.staged.pop((order.operation_id, rank), None)


class Sender:
    """A trainer that sends the pieces of one session from disk."""

    def __init__(self, client: Client, session_id: str = "session-1") -> None:
        self.client = client
        self.session_id = session_id

    def begin(self, version: str = "v2", **fields: Any) -> pb.UpdateWeightsRequest:
        """`lease_ms`, `transfer` of the session; the rest of the update."""
        transfer = fields.pop("transfer", {"disk": pb.DiskTransfer(path="/models/new")})
        lease_ms = fields.pop("lease_ms", None)
        begin = pb.WeightSessionBegin(lease_ms=lease_ms, **transfer)
        if "under_pause" not in fields:
            fields.setdefault("pause", "drain")
        session = pb.WeightSession(session_id=self.session_id, begin=begin)
        return self.client.update(version, session=session, **fields)

    def chunk(self, index: int, *files: str, **fields: Any) -> pb.UpdateWeightsRequest:
        payload = fields.pop("payload", None) or {
            "disk": pb.DiskChunk(files=files or (f"part-{index}",))
        }
        return self._stage(chunk=pb.WeightSessionChunk(index=index, **payload), **fields)

    def commit(
        self, chunks: int, version: str | None = None, **fields: Any
    ) -> pb.UpdateWeightsRequest:
        commit = pb.WeightSessionCommit(chunks=chunks, weight_version=version)
        return self._stage(commit=commit, **fields)

    def abort(self, reason: str = "", **fields: Any) -> pb.UpdateWeightsRequest:
        return self._stage(abort=pb.WeightSessionAbort(reason=reason), **fields)

    def _stage(self, **fields: Any) -> pb.UpdateWeightsRequest:
        stages = ("chunk", "commit", "abort")
        stage = {name: fields.pop(name) for name in stages if name in fields}
        fields.setdefault("idempotency_key", self.client.key())
        fields.setdefault("session_id", self.session_id)
        session = pb.WeightSession(session_id=fields.pop("session_id"), **stage)
        return pb.UpdateWeightsRequest(session=session, **fields)

    async def begun(self, **fields: Any) -> Observing:
        """Its stream, once the ranks take pieces."""
        observing = await self.client.begin(self.begin(**fields))
        await told(observing, "open")
        return observing

    async def sent(self, request: pb.UpdateWeightsRequest) -> str:
        """Accepted, and no longer listened to; the operation's id."""
        observing = await self.client.begin(request)
        observing.detach()
        return str(observing.events[0].operation_id)


async def told(observing: Observing, phase: str, done: int = 0) -> Event:
    """Read on until that progress is told. AssertionError at the end of the stream."""
    while (event := await observing.next()) is not None:
        progress = event.progress
        if event.HasField("progress") and (progress.phase, progress.done) == (phase, done):
            return event
    raise AssertionError(f"no {phase} {done}: {observing.events[-1]}")
