"""A trainer that sends the pieces of one weight session, by a way that the engine takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.conformance.case import NotGiven, NotHeld, NotPromised, expect
from app.conformance.client import Stream
from app.conformance.record import TERMINAL, Refusal, Told, kind_of
from app.conformance.tensors import Weights, files_of
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

DISK, IPC = pb.WEIGHT_TRANSFER_BACKEND_DISK, pb.WEIGHT_TRANSFER_BACKEND_IPC
CHUNKS = "chunks"
"""The unit of progress that counts pieces."""


def require(trial: Trial) -> None:
    """Raises NotPromised."""
    trial.require(pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS)
    if pb.WEIGHT_SOURCE_KIND_SESSION not in trial.profile.weight_sources:
        raise NotPromised("the profile does not offer weight sessions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """`begin` and `payloads` are fields of WeightSessionBegin and WeightSessionChunk."""

    begin: dict[str, Any]
    payloads: tuple[dict[str, Any], ...] = field(default=())


def on_disk(trial: Trial) -> Pieces:
    """The weights that were given, a file in each piece."""
    assert trial.options.weights_copy is not None, "the case did not say that it needs it"
    files = files_of(trial.options.weights_copy)
    return Pieces(
        begin={"disk": pb.DiskTransfer(path=trial.stock.path)},
        payloads=tuple({"disk": pb.DiskChunk(files=[file.name])} for file in files),
    )


@contextmanager
def in_memory(trial: Trial, weights: Weights) -> Iterator[Pieces]:
    """In two pieces, each in a segment of its own, which are there for as long as the block."""
    places, prefix = trial.options.places, trial.options.places.shared_prefix
    assert prefix is not None, "the case did not say that it needs it"
    trial.altered = True
    with ExitStack() as stack:
        payloads = []
        for part in (weights[::2], weights[1::2]):
            shared = stack.enter_context(places.segment(prefix, part))
            handles = [
                pb.IpcHandle(handle=shared.object_name.encode(), offset_bytes=one.offset_bytes)
                for one in shared.tensors
            ]
            specs = [one.spec for one in shared.tensors]
            payloads.append({"ipc": pb.IpcChunk(tensors=specs, handles=handles)})
        yield Pieces(begin={"ipc": pb.IpcTransfer()}, payloads=tuple(payloads))


@contextmanager
def given(trial: Trial) -> Iterator[Pieces]:
    """The weights that were given, by a way that is offered. Raises NotGiven."""
    require(trial)
    offered = trial.profile.weight_sessions
    if DISK in offered:
        yield on_disk(trial)
    elif IPC in offered and trial.options.places.shared_prefix is not None:
        with in_memory(trial, trial.stock.copy) as pieces:
            yield pieces
    else:
        raise NotGiven("pieces can be handed over neither on disk nor by --shared-memory-prefix")


class Sender:
    """Of one session; each call has a key of its own."""

    def __init__(self, trial: Trial, pieces: Pieces) -> None:
        self._trial = trial
        self._pieces = pieces
        self.session_id = f"session-{trial.key()}"

    def begin(self, *, lease_ms: int | None = None, **fields: Any) -> pb.UpdateWeightsRequest:
        begin = pb.WeightSessionBegin(lease_ms=lease_ms, **self._pieces.begin)
        session = pb.WeightSession(session_id=self.session_id, begin=begin)
        return self._trial.orders.load(session=session, **fields)

    def chunk(self, index: int, at: int | None = None) -> pb.UpdateWeightsRequest:
        """`at`: which index it is sent with."""
        payload = self._pieces.payloads[index]
        number = index if at is None else at
        return self._stage(chunk=pb.WeightSessionChunk(index=number, **payload))

    def commit(self, chunks: int) -> pb.UpdateWeightsRequest:
        return self._stage(commit=pb.WeightSessionCommit(chunks=chunks))

    def abort(self) -> pb.UpdateWeightsRequest:
        return self._stage(abort=pb.WeightSessionAbort(reason="as the suite says"))

    @property
    def pieces(self) -> int:
        return len(self._pieces.payloads)

    def _stage(self, **stage: Any) -> pb.UpdateWeightsRequest:
        session = pb.WeightSession(session_id=self.session_id, **stage)
        request: pb.UpdateWeightsRequest = self._trial.orders.of(
            pb.UpdateWeightsRequest, session=session
        )
        return request

    # ---- sent ----

    @asynccontextmanager
    async def begun(self, **fields: Any) -> AsyncGenerator[Stream]:
        """Its stream; the session is called off behind the block, if it is still open."""
        stream = self._trial.client.send(self.begin(**fields))
        await stream.first()
        try:
            yield stream
        finally:
            await self._called_off()

    async def _called_off(self) -> None:
        await self._trial.client.told(self.abort())  # refused where it has ended

    async def taken(self, request: pb.UpdateWeightsRequest) -> str:
        """The operation of a call that was taken on, and is no longer listened to."""
        stream = self._trial.client.send(request)
        first = await stream.first()
        stream.detach()
        return first.operation_id

    async def staged(self, stream: Stream, count: int) -> None:
        """Heard on until so many pieces are staged. Raises NotHeld."""
        while not _counts(stream.told, count):
            event = await stream.next()
            expect(
                event is not None and kind_of(event) not in TERMINAL,
                f"progress of the unit {CHUNKS} with {count} done",
                stream.told,
            )

    async def all_staged(self, stream: Stream) -> None:
        for index in range(self.pieces):
            await self.taken(self.chunk(index))
            await self.staged(stream, index + 1)

    async def turned_down(self, request: pb.UpdateWeightsRequest, *codes: Any) -> Refusal:
        return await self._trial.client.refused(request, *codes)


def _counts(told: Told, count: int) -> bool:
    return any(
        event.HasField("progress")
        and event.progress.unit == CHUNKS
        and event.progress.done >= count
        for event in told.events
    )


def end_of(told: Told) -> str:
    """completed, failed or cancelled. Raises NotHeld."""
    kind = kind_of(told.events[-1]) if told.events else ""
    if kind not in TERMINAL:
        raise NotHeld("the session to end", str(told))
    return kind
