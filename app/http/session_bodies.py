"""Weight sessions as they may be sent: one operation, ordered by several calls."""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints

from app.domain.command import fault
from app.domain.engine_payloads import EnginePayloadChunk, EnginePayloadTransfer
from app.domain.errors import InvalidArgument
from app.domain.kinds import CollectiveBackend
from app.domain.weight_sessions import (
    MAX_CHUNKS,
    MAX_VERSION_CHARS,
    AbortSession,
    Chunk,
    CommitSession,
    DiskChunk,
    DiskTransfer,
    IpcChunk,
    IpcHandle,
    IpcTransfer,
    NcclChunk,
    NcclTransfer,
    Payload,
    SessionStage,
    SessionWeights,
    Stage,
    Transfer,
)
from app.http.bodies import BIGGEST, Address, Body, Count, Words, sequence
from app.http.tensor_bodies import ONE_LINE, GroupRank, Path, TensorName, TensorSpecBody

WeightVersion = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_VERSION_CHARS, pattern=ONE_LINE)
]
SessionId = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,128}$")]
Positive = Annotated[int, Field(ge=1, le=BIGGEST)]
Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2}){1,4096}$")]
Specs = Annotated[
    tuple[TensorSpecBody, ...], Field(min_length=1, max_length=65536), BeforeValidator(sequence)
]


_ONE_WAY = "name one: nccl, ipc, disk or engine_payload"


class NcclTransferBody(Body):
    """A process group of a trainer's that the engine's ranks join for the session."""

    address: Address = Field(description="Within what the engine allows.")
    port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=65536)] = Field(
        description="Trainer and engine ranks together."
    )
    rank_offset: GroupRank = Field(description="Of the engine's rank 0.")
    backend: Annotated[CollectiveBackend, Field(strict=False)] = CollectiveBackend.NCCL
    group: Annotated[str, StringConstraints(max_length=512, pattern=ONE_LINE)] = ""
    source_rank: GroupRank = Field(0, description="The one that sends.")

    def transfer(self) -> NcclTransfer:
        return NcclTransfer(
            address=self.address,
            port=self.port,
            world_size=self.world_size,
            rank_offset=self.rank_offset,
            backend=self.backend,
            group=self.group,
            source_rank=self.source_rank,
        )


class IpcTransferBody(Body):
    """Memory that another process on the engine's machine shares; each chunk says which."""


class DiskTransferBody(Body):
    path: Path = Field(description="A folder, as the engine's host sees it.")


class EnginePayloadTransferBody(Body):
    """What the engine's own serializer has written. Takes `admin:weights.unsafe`, and has to be
    switched on for the engine."""

    format: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,127}$")] = Field(
        description="One of the engine's `payload_formats`."
    )


class BeginBody(Body):
    """One of `nccl`, `ipc`, `disk`, `engine_payload`: how the pieces travel."""

    lease_ms: Positive | None = Field(
        None,
        description="Without a call for so long the session ends; absent: the engine's default.",
    )
    nccl: NcclTransferBody | None = None
    ipc: IpcTransferBody | None = None
    disk: DiskTransferBody | None = None
    engine_payload: EnginePayloadTransferBody | None = None

    def transfer(self) -> Transfer:
        named = (self.nccl, self.ipc, self.disk, self.engine_payload)
        match [one for one in named if one is not None]:
            case [NcclTransferBody() as group]:
                return group.transfer()
            case [IpcTransferBody()]:
                return IpcTransfer()
            case [DiskTransferBody(path=path)]:
                return DiskTransfer(path)
            case [EnginePayloadTransferBody(format=written)]:
                return EnginePayloadTransfer(written)
            case _:
                raise fault("/source/session/begin", _ONE_WAY)


class NcclChunkBody(Body):
    tensors: Specs = Field(description="In the order in which they are broadcast.")
    packed: bool = False
    packed_buffer_bytes: Positive | None = None
    packed_buffers: Positive | None = None

    def payload(self) -> NcclChunk:
        return NcclChunk(
            tensors=tuple(one.spec() for one in self.tensors),
            packed=self.packed,
            packed_buffer_bytes=self.packed_buffer_bytes,
            packed_buffers=self.packed_buffers,
        )


class IpcHandleBody(Body):
    """Either `object_name`, of a POSIX shared memory object in the host's memory; or `device_uuid`
    and `handle`, which is the device's own."""

    object_name: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,255}$")] | None = None
    device_uuid: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None
    handle: Hex | None = Field(None, description="In hex.")
    offset_bytes: Count = 0

    def of(self, pointer: str) -> IpcHandle:
        match self.object_name, self.device_uuid, self.handle:
            case str() as name, None, None:
                return IpcHandle("", name.encode(), self.offset_bytes)
            case None, str() as device, str() as handle:
                return IpcHandle(device, bytes.fromhex(handle), self.offset_bytes)
            case _:
                raise fault(pointer, "say object_name, or device_uuid and handle")


class IpcChunkBody(Body):
    tensors: Specs
    handles: Annotated[
        tuple[IpcHandleBody, ...],
        Field(min_length=1, max_length=262_144),
        BeforeValidator(sequence),
    ] = Field(description="One for each tensor and device, grouped by tensor.")

    def payload(self) -> IpcChunk:
        pointer = "/source/session/chunk/ipc/handles"
        return IpcChunk(
            tuple(one.spec() for one in self.tensors),
            tuple(one.of(f"{pointer}/{index}") for index, one in enumerate(self.handles)),
        )


class DiskChunkBody(Body):
    files: Annotated[
        tuple[TensorName, ...], Field(min_length=1, max_length=4096), BeforeValidator(sequence)
    ] = Field(description="Below the path of the session.")


Base64 = Annotated[str, StringConstraints(min_length=1, max_length=1 << 30)]


class EnginePayloadChunkBody(Body):
    """Passed on as it is, once; kept until the operation ends, and never shown."""

    parts: Annotated[
        tuple[Base64, ...], Field(min_length=1, max_length=4096), BeforeValidator(sequence)
    ] = Field(description="Base64: one for each rank that the engine deals them out to.")
    load_format: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,256}$")] | None = Field(
        None, description="How the engine is to read them, in its own words."
    )

    def payload(self) -> EnginePayloadChunk:
        pointer = "/source/session/chunk/engine_payload/parts"
        parts = []
        for index, part in enumerate(self.parts):
            try:
                parts.append(base64.b64decode(part, validate=True))
            except ValueError:
                raise fault(f"{pointer}/{index}", "is not base64") from None
        return EnginePayloadChunk(tuple(parts), self.load_format)


class ChunkBody(Body):
    """One of `nccl`, `ipc`, `disk`, `engine_payload`: as the session began."""

    index: Annotated[int, Field(ge=0, lt=MAX_CHUNKS)] = Field(description="0, 1, 2 …, no gap.")
    nccl: NcclChunkBody | None = None
    ipc: IpcChunkBody | None = None
    disk: DiskChunkBody | None = None
    engine_payload: EnginePayloadChunkBody | None = None

    def payload(self) -> Payload:
        named = (self.nccl, self.ipc, self.disk, self.engine_payload)
        match [one for one in named if one is not None]:
            case [DiskChunkBody(files=files)]:
                return DiskChunk(files)
            case [(NcclChunkBody() | IpcChunkBody() | EnginePayloadChunkBody()) as sent]:
                return sent.payload()
            case _:
                raise fault("/source/session/chunk", _ONE_WAY)


class CommitBody(Body):
    chunks: Annotated[int, Field(ge=0, le=MAX_CHUNKS)] = Field(
        description="How many were sent. If another number was taken, nothing is committed."
    )
    weight_version: WeightVersion | None = Field(
        None, description="What the new weights are called; else as the update said."
    )


class AbortBody(Body):
    reason: Words = Field("", description="Kept as a warning of the operation.")


class SessionSourceBody(Body):
    """The first call says `begin`, and all that an update says. Each later one says `chunk`,
    `commit` or `abort`, and nothing else of the update."""

    session_id: SessionId = Field(description="Yours; it names the operation.")
    begin: BeginBody | None = None
    chunk: ChunkBody | None = None
    commit: CommitBody | None = None
    abort: AbortBody | None = None

    def source(self) -> SessionWeights:
        if self.begin is None or self._later() is not None:
            raise _one_of_them()
        return SessionWeights(self.session_id, self.begin.transfer(), self.begin.lease_ms)

    def stage(self) -> SessionStage | None:
        """None: it is the first call."""
        later = self._later()
        if later is None:
            return None
        if self.begin is not None:
            raise _one_of_them()
        return SessionStage(self.session_id, later)

    def _later(self) -> Stage | None:
        match self.chunk, self.commit, self.abort:
            case None, None, None:
                return None
            case ChunkBody() as chunk, None, None:
                return Chunk(chunk.index, chunk.payload())
            case None, CommitBody(chunks=chunks, weight_version=version), None:
                return CommitSession(chunks, version)
            case None, None, AbortBody(reason=reason):
                return AbortSession(reason)
            case _:
                raise _one_of_them()


def _one_of_them() -> InvalidArgument:
    return fault("/source/session", "say one: begin, chunk, commit or abort")
