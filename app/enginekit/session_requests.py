"""Weight sessions as they come over the wire: the order that begins one, and the calls after it."""

from __future__ import annotations

from app.domain.capabilities import Capabilities
from app.domain.engine_payloads import EnginePayloadChunk, EnginePayloadTransfer
from app.domain.errors import UnsupportedOperation
from app.domain.kinds import CollectiveBackend, WeightSourceKind
from app.domain.weight_sessions import (
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
from app.enginekit.tensor_requests import bad_field, read_spec
from app.enginekit.vocabulary import COLLECTIVE_BACKEND
from app.rpc.openengine.v1 import admin_pb2

_SAID_BY_BEGIN = frozenset(
    {
        "deadline_ms",
        "weight_version",
        "cache_policy",
        "components",
        "under_pause",
        "pause",
        "check_finite",
    }
)


def goes_on(request: admin_pb2.UpdateWeightsRequest) -> bool:
    """Whether it is a call after BEGIN."""
    stage = request.session.WhichOneof("stage") if request.HasField("session") else None
    return stage is not None and stage != "begin"


def refuse_sessions(request: admin_pb2.UpdateWeightsRequest, can: Capabilities) -> None:
    """Raises UnsupportedOperation for a session where there are none."""
    if request.HasField("session") and WeightSourceKind.SESSION not in can.weight_sources:
        raise UnsupportedOperation("this engine does not offer weight sessions")


def read_begin(session: admin_pb2.WeightSession) -> SessionWeights:
    """Raises InvalidArgument."""
    if not session.HasField("begin"):
        raise bad_field("/session", "say begin, chunk, commit or abort")
    begin = session.begin
    return SessionWeights(
        session_id=session.session_id,
        transfer=_transfer(begin),
        lease_ms=begin.lease_ms if begin.HasField("lease_ms") else None,
    )


def read_stage(request: admin_pb2.UpdateWeightsRequest) -> SessionStage:
    """Raises InvalidArgument."""
    for field, _ in request.ListFields():
        if field.name in _SAID_BY_BEGIN:
            raise bad_field(f"/{field.name}", "is said when the session begins, and not again")
    session = request.session
    return SessionStage(session.session_id, _stage(session))


def _stage(session: admin_pb2.WeightSession) -> Stage:
    match session.WhichOneof("stage"):
        case "chunk":
            return Chunk(session.chunk.index, _payload(session.chunk))
        case "commit":
            commit = session.commit
            named = commit.HasField("weight_version")
            return CommitSession(commit.chunks, commit.weight_version if named else None)
        case _:
            return AbortSession(session.abort.reason)


def _transfer(begin: admin_pb2.WeightSessionBegin) -> Transfer:
    match begin.WhichOneof("transfer"):
        case "nccl":
            return read_group(begin.nccl)
        case "ipc":
            return IpcTransfer()
        case "disk":
            return DiskTransfer(begin.disk.path)
        case "engine_payload":
            return EnginePayloadTransfer(begin.engine_payload.format)
        case _:
            raise bad_field("/session/begin", "say nccl, ipc, disk or engine_payload")


def read_group(group: admin_pb2.NcclTransfer) -> NcclTransfer:
    """Raises InvalidArgument."""
    backend = CollectiveBackend.NCCL
    if group.HasField("backend"):
        backend = COLLECTIVE_BACKEND.read(group.backend, "/session/begin/nccl/backend")
    return NcclTransfer(
        address=group.address,
        port=group.port,
        world_size=group.world_size,
        rank_offset=group.rank_offset,
        backend=backend,
        group=group.group,
        source_rank=group.source_rank,
    )


def _payload(chunk: admin_pb2.WeightSessionChunk) -> Payload:
    pointer = "/session/chunk"
    match chunk.WhichOneof("payload"):
        case "nccl":
            sent = chunk.nccl
            size = sent.packed_buffer_bytes if sent.HasField("packed_buffer_bytes") else None
            return NcclChunk(
                tensors=tuple(
                    read_spec(spec, f"{pointer}/nccl/tensors/{index}")
                    for index, spec in enumerate(sent.tensors)
                ),
                packed=sent.packed,
                packed_buffer_bytes=size,
                packed_buffers=sent.packed_buffers if sent.HasField("packed_buffers") else None,
            )
        case "ipc":
            return IpcChunk(
                tensors=tuple(
                    read_spec(spec, f"{pointer}/ipc/tensors/{index}")
                    for index, spec in enumerate(chunk.ipc.tensors)
                ),
                handles=tuple(
                    IpcHandle(one.device_uuid, one.handle, one.offset_bytes)
                    for one in chunk.ipc.handles
                ),
            )
        case "disk":
            return DiskChunk(tuple(chunk.disk.files))
        case "engine_payload":
            own = chunk.engine_payload
            how = own.load_format if own.HasField("load_format") else None
            return EnginePayloadChunk(tuple(own.parts), how)
        case _:
            raise bad_field(pointer, "say nccl, ipc, disk or engine_payload")
