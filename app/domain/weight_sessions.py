"""New weights in pieces: a session is ONE update, ordered by several calls.

BEGIN is the order; it names the session, and how its pieces travel. CHUNK, COMMIT and ABORT go on
with it. Each way of travelling has a schema of its own: nothing is passed on unread but what an
engine alone can read, where that is allowed by name (`app.domain.engine_payloads`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar, TypeAlias, cast

from app.domain.capabilities import Capabilities
from app.domain.command import fault
from app.domain.engine_payloads import EnginePayloadChunk, EnginePayloadTransfer
from app.domain.errors import UnsupportedOperation
from app.domain.kinds import (
    CollectiveBackend,
    OperationKind,
    WeightSourceKind,
    WeightTransferBackend,
)
from app.domain.operation import JsonObject, JsonValue
from app.domain.tensors import TensorSpec, check_unique

MAX_CHUNKS = 65_536
MAX_REASON_CHARS = 500
MAX_VERSION_CHARS = 256
_POINTER = "/source/session"
_SESSION_ID = re.compile(r"[\x21-\x7e]{1,128}")


# ---- how the pieces travel ----


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTransfer:
    """A process group that a trainer opens, kept for the session: `world_size` members, the
    engine's rank r at `rank_offset` + r. `source_rank` broadcasts the tensors of each chunk."""

    kind: ClassVar[WeightTransferBackend] = WeightTransferBackend.NCCL
    address: str
    port: int
    world_size: int
    rank_offset: int
    backend: CollectiveBackend = CollectiveBackend.NCCL
    group: str = ""
    source_rank: int = 0

    def __post_init__(self) -> None:
        pointer = f"{_POINTER}/begin/nccl"
        if not self.address or not self.address.isprintable():
            raise fault(f"{pointer}/address", "must be a host name or an address")
        if not 0 < self.port < 65536:
            raise fault(f"{pointer}/port", "must be within 1 and 65535")
        if self.world_size < 2:
            raise fault(f"{pointer}/world_size", "must count the trainer and the engine")
        for name, rank in (("rank_offset", self.rank_offset), ("source_rank", self.source_rank)):
            if not 0 <= rank < self.world_size:
                raise fault(f"{pointer}/{name}", "must be a rank of the group")

    def check_ranks(self, ranks: int) -> None:
        """Raises InvalidArgument."""
        pointer = f"{_POINTER}/begin/nccl"
        if self.rank_offset + ranks > self.world_size:
            raise fault(f"{pointer}/rank_offset", "leaves no room for the engine's ranks")
        if self.rank_offset <= self.source_rank < self.rank_offset + ranks:
            raise fault(f"{pointer}/source_rank", "is one of the engine's own ranks")

    def document(self) -> dict[str, JsonValue]:
        return {
            "address": self.address,
            "port": self.port,
            "world_size": self.world_size,
            "rank_offset": self.rank_offset,
            "backend": self.backend.value,
            "group": self.group,
            "source_rank": self.source_rank,
        }

    @classmethod
    def of(cls, document: JsonObject) -> NcclTransfer:
        return cls(
            address=cast("str", document["address"]),
            port=cast("int", document["port"]),
            world_size=cast("int", document["world_size"]),
            rank_offset=cast("int", document["rank_offset"]),
            backend=CollectiveBackend(cast("str", document["backend"])),
            group=cast("str", document["group"]),
            source_rank=cast("int", document["source_rank"]),
        )


@dataclass(frozen=True, slots=True)
class IpcTransfer:
    """Memory that another process on the engine's machine shares; each chunk says which."""

    kind: ClassVar[WeightTransferBackend] = WeightTransferBackend.IPC

    def document(self) -> dict[str, JsonValue]:
        return {}

    @classmethod
    def of(cls, _document: JsonObject) -> IpcTransfer:
        return cls()


@dataclass(frozen=True, slots=True)
class DiskTransfer:
    """Safetensors files below `path`, which the engine checks against its own roots."""

    kind: ClassVar[WeightTransferBackend] = WeightTransferBackend.DISK
    path: str

    def __post_init__(self) -> None:
        if not self.path or "\0" in self.path:
            raise fault(f"{_POINTER}/begin/disk/path", "must be the path of a folder")

    def document(self) -> dict[str, JsonValue]:
        return {"path": self.path}

    @classmethod
    def of(cls, document: JsonObject) -> DiskTransfer:
        return cls(cast("str", document["path"]))


Transfer: TypeAlias = NcclTransfer | IpcTransfer | DiskTransfer | EnginePayloadTransfer

_TRANSFERS: Mapping[str, Callable[[JsonObject], Transfer]] = {
    WeightTransferBackend.NCCL: NcclTransfer.of,
    WeightTransferBackend.IPC: IpcTransfer.of,
    WeightTransferBackend.DISK: DiskTransfer.of,
    WeightTransferBackend.ENGINE_PAYLOAD: EnginePayloadTransfer.of,
}


@dataclass(frozen=True, slots=True)
class SessionWeights:
    """The source of an update whose weights come in pieces. `session_id` is the caller's, 1 to 128
    printable ASCII characters without blanks. `lease_ms`: without a call for so long the session
    ends by itself; None: the engine's default."""

    kind: ClassVar[WeightSourceKind] = WeightSourceKind.SESSION
    session_id: str
    transfer: Transfer
    lease_ms: int | None = None

    def __post_init__(self) -> None:
        check_session_id(self.session_id)
        if self.lease_ms is not None and self.lease_ms <= 0:
            raise fault(f"{_POINTER}/begin/lease_ms", "must be above 0 ms")

    def check_supported(self, can: Capabilities) -> None:
        """Raises UnsupportedOperation, InvalidArgument."""
        _require(self.transfer.kind, can)
        match self.transfer:
            case NcclTransfer() as group:
                group.check_ranks(can.world_size)
            case EnginePayloadTransfer(format=named) if named not in can.payload_formats:
                raise UnsupportedOperation("this engine takes no payload of that format")

    def document(self) -> dict[str, JsonValue]:
        return {
            "session_id": self.session_id,
            "lease_ms": self.lease_ms,
            "transfer": {self.transfer.kind.value: self.transfer.document()},
        }

    @classmethod
    def of(cls, document: JsonObject) -> SessionWeights:
        ((kind, parts),) = cast("dict[str, JsonObject]", document["transfer"]).items()
        return cls(
            session_id=cast("str", document["session_id"]),
            transfer=_TRANSFERS[kind](parts),
            lease_ms=cast("int | None", document["lease_ms"]),
        )


# ---- one piece ----


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclChunk:
    """What is broadcast next, in this order. `packed`: as runs of bytes in `packed_buffers`
    buffers of `packed_buffer_bytes` each, the engine's default where None."""

    kind: ClassVar[WeightTransferBackend] = WeightTransferBackend.NCCL
    tensors: tuple[TensorSpec, ...]
    packed: bool = False
    packed_buffer_bytes: int | None = None
    packed_buffers: int | None = None

    def __post_init__(self) -> None:
        pointer = f"{_POINTER}/chunk/nccl"
        check_unique((spec.name for spec in self.tensors), f"{pointer}/tensors")
        for name in ("packed_buffer_bytes", "packed_buffers"):
            value = getattr(self, name)
            if value is not None and (value <= 0 or not self.packed):
                raise fault(f"{pointer}/{name}", "must be above 0, and goes with packed")

    def document(self) -> dict[str, JsonValue]:
        return {
            "tensors": [spec.document() for spec in self.tensors],
            "packed": self.packed,
            "packed_buffer_bytes": self.packed_buffer_bytes,
            "packed_buffers": self.packed_buffers,
        }

    @classmethod
    def of(cls, document: JsonObject) -> NcclChunk:
        return cls(
            tensors=_specs(document),
            packed=cast("bool", document["packed"]),
            packed_buffer_bytes=cast("int | None", document["packed_buffer_bytes"]),
            packed_buffers=cast("int | None", document["packed_buffers"]),
        )


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """Where one tensor lies for one device. `device_uuid` empty: in the host's memory, where
    `handle` is the name of a POSIX shared memory object, in ASCII; else the device's own handle.
    """

    device_uuid: str
    handle: bytes
    offset_bytes: int

    def document(self) -> dict[str, JsonValue]:
        return {
            "device_uuid": self.device_uuid,
            "handle": self.handle.hex(),
            "offset_bytes": self.offset_bytes,
        }

    @classmethod
    def of(cls, document: JsonObject) -> IpcHandle:
        return cls(
            device_uuid=cast("str", document["device_uuid"]),
            handle=bytes.fromhex(cast("str", document["handle"])),
            offset_bytes=cast("int", document["offset_bytes"]),
        )


@dataclass(frozen=True, slots=True)
class IpcChunk:
    """`handles`: one for each tensor and device, grouped by tensor."""

    kind: ClassVar[WeightTransferBackend] = WeightTransferBackend.IPC
    tensors: tuple[TensorSpec, ...]
    handles: tuple[IpcHandle, ...]

    def __post_init__(self) -> None:
        pointer = f"{_POINTER}/chunk/ipc"
        check_unique((spec.name for spec in self.tensors), f"{pointer}/tensors")
        if not self.handles or len(self.handles) % len(self.tensors):
            raise fault(f"{pointer}/handles", "must be as many for each tensor")
        for index, one in enumerate(self.handles):
            if not one.handle:
                raise fault(f"{pointer}/handles/{index}/handle", "must not be empty")

    def of_tensor(self, index: int) -> tuple[IpcHandle, ...]:
        """Its handles, one for each device."""
        devices = len(self.handles) // len(self.tensors)
        return self.handles[index * devices : (index + 1) * devices]

    def document(self) -> dict[str, JsonValue]:
        return {
            "tensors": [spec.document() for spec in self.tensors],
            "handles": [one.document() for one in self.handles],
        }

    @classmethod
    def of(cls, document: JsonObject) -> IpcChunk:
        handles = cast("list[JsonObject]", document["handles"])
        return cls(_specs(document), tuple(IpcHandle.of(one) for one in handles))


@dataclass(frozen=True, slots=True)
class DiskChunk:
    """`files` below the path of the session."""

    kind: ClassVar[WeightTransferBackend] = WeightTransferBackend.DISK
    files: tuple[str, ...]

    def __post_init__(self) -> None:
        pointer = f"{_POINTER}/chunk/disk/files"
        check_unique(self.files, pointer)
        for index, file in enumerate(self.files):
            name = PurePosixPath(file)
            if name.is_absolute() or ".." in name.parts or "\0" in file:
                raise fault(f"{pointer}/{index}", "must be below the path of the session")

    def document(self) -> dict[str, JsonValue]:
        return {"files": list(self.files)}

    @classmethod
    def of(cls, document: JsonObject) -> DiskChunk:
        return cls(tuple(cast("list[str]", document["files"])))


Payload: TypeAlias = NcclChunk | IpcChunk | DiskChunk | EnginePayloadChunk

_PAYLOADS: Mapping[str, Callable[[JsonObject], Payload]] = {
    WeightTransferBackend.NCCL: NcclChunk.of,
    WeightTransferBackend.IPC: IpcChunk.of,
    WeightTransferBackend.DISK: DiskChunk.of,
    WeightTransferBackend.ENGINE_PAYLOAD: EnginePayloadChunk.of,
}


# ---- the calls after the first ----


@dataclass(frozen=True, slots=True)
class Chunk:
    """`index` counts from 0 without a gap."""

    name: ClassVar[str] = "chunk"
    index: int
    payload: Payload

    def __post_init__(self) -> None:
        if not 0 <= self.index < MAX_CHUNKS:
            raise fault(f"{_POINTER}/chunk/index", f"must be below {MAX_CHUNKS}")

    def document(self) -> dict[str, JsonValue]:
        return {
            "index": self.index,
            "payload": {self.payload.kind.value: self.payload.document()},
        }

    @classmethod
    def of(cls, document: JsonObject) -> Chunk:
        ((kind, parts),) = cast("dict[str, JsonObject]", document["payload"]).items()
        return cls(cast("int", document["index"]), _PAYLOADS[kind](parts))


@dataclass(frozen=True, slots=True)
class CommitSession:
    """`chunks`: how many were sent. If the engine has taken another number, nothing is committed
    and the session is over. `weight_version` None: as the update said."""

    name: ClassVar[str] = "commit"
    chunks: int
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if self.weight_version is not None:
            check_version(self.weight_version, f"{_POINTER}/commit/weight_version")

    def document(self) -> dict[str, JsonValue]:
        named = {} if self.weight_version is None else {"weight_version": self.weight_version}
        return {"chunks": self.chunks, **named}

    @classmethod
    def of(cls, document: JsonObject) -> CommitSession:
        version = cast("str | None", document.get("weight_version"))
        return cls(cast("int", document["chunks"]), version)


@dataclass(frozen=True, slots=True)
class AbortSession:
    """`reason`: in the caller's words, kept as a warning of the operation."""

    name: ClassVar[str] = "abort"
    reason: str = ""

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_REASON_CHARS or not self.reason.isprintable():
            detail = f"must be at most {MAX_REASON_CHARS} printable characters"
            raise fault(f"{_POINTER}/abort/reason", detail)

    def document(self) -> dict[str, JsonValue]:
        return {"reason": self.reason}

    @classmethod
    def of(cls, document: JsonObject) -> AbortSession:
        return cls(cast("str", document["reason"]))


Stage: TypeAlias = Chunk | CommitSession | AbortSession

_STAGES: Mapping[str, Callable[[JsonObject], Stage]] = {
    Chunk.name: Chunk.of,
    CommitSession.name: CommitSession.of,
    AbortSession.name: AbortSession.of,
}


@dataclass(frozen=True, slots=True)
class SessionStage:
    """A call that goes on with the session of that name."""

    kind: ClassVar[OperationKind] = OperationKind.UPDATE_WEIGHTS
    session_id: str
    stage: Stage

    def __post_init__(self) -> None:
        check_session_id(self.session_id)

    def check_supported(self, can: Capabilities) -> None:
        """Raises UnsupportedOperation, InvalidArgument."""
        payload = self.stage.payload if isinstance(self.stage, Chunk) else None
        _require(None if payload is None else payload.kind, can)
        if isinstance(payload, EnginePayloadChunk):
            payload.check_fits(can.limits.max_message_bytes)

    def check_fits(self, source: SessionWeights) -> None:
        """Raises InvalidArgument for a chunk that travels in another way than the session's."""
        stage = self.stage
        if isinstance(stage, Chunk) and stage.payload.kind is not source.transfer.kind:
            detail = f"the chunks of this session travel by {source.transfer.kind.value}"
            raise fault(f"{_POINTER}/chunk/{stage.payload.kind.value}", detail)

    def document(self) -> JsonObject:
        return {"session_id": self.session_id, self.stage.name: self.stage.document()}


def stage_document(stage: Stage) -> JsonObject:
    return {stage.name: stage.document()}


def stage_of(document: JsonObject) -> Stage:
    """Reads back what `stage_document` wrote. KeyError or ValueError: not written by it."""
    ((name, parts),) = document.items()
    return _STAGES[name](cast("JsonObject", parts))


def check_version(version: str, pointer: str) -> None:
    """What weights may be called. Raises InvalidArgument."""
    if not version or not version.isprintable() or len(version) > MAX_VERSION_CHARS:
        raise fault(pointer, f"must be 1 to {MAX_VERSION_CHARS} printable characters")


def check_session_id(session_id: str) -> None:
    """Raises InvalidArgument."""
    if not _SESSION_ID.fullmatch(session_id):
        detail = "must be 1 to 128 printable ASCII characters without blanks"
        raise fault(f"{_POINTER}/session_id", detail)


def _require(backend: WeightTransferBackend | None, can: Capabilities) -> None:
    offered = OperationKind.UPDATE_WEIGHTS in can.operations
    if not offered or WeightSourceKind.SESSION not in can.weight_sources:
        raise UnsupportedOperation("this engine does not offer weight sessions")
    if backend is not None and backend not in can.weight_sessions:
        raise UnsupportedOperation(f"this engine does not offer weight sessions by {backend.value}")


def _specs(document: JsonObject) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.of(one) for one in cast("list[JsonObject]", document["tensors"]))
