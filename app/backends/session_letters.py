"""A weight session on its way to an engine: the order that begins it, and the calls after it."""

from __future__ import annotations

from app.backends.spelling import number_of
from app.domain.engine_payloads import EnginePayloadChunk, EnginePayloadTransfer
from app.domain.tensors import TensorSpec
from app.domain.weight_sessions import (
    AbortSession,
    Chunk,
    CommitSession,
    DiskChunk,
    DiskTransfer,
    IpcChunk,
    IpcTransfer,
    NcclChunk,
    NcclTransfer,
    SessionStage,
    SessionWeights,
)
from app.rpc.openengine.v1 import admin_pb2


def begin_of(session: SessionWeights) -> admin_pb2.WeightSession:
    begin = admin_pb2.WeightSessionBegin(lease_ms=session.lease_ms)
    match session.transfer:
        case NcclTransfer() as group:
            begin.nccl.CopyFrom(group_of(group))
        case IpcTransfer():
            begin.ipc.SetInParent()
        case DiskTransfer(path=path):
            begin.disk.path = path
        case EnginePayloadTransfer(format=named):
            begin.engine_payload.format = named
    return admin_pb2.WeightSession(session_id=session.session_id, begin=begin)


def group_of(group: NcclTransfer) -> admin_pb2.NcclTransfer:
    return admin_pb2.NcclTransfer(
        address=group.address,
        port=group.port,
        world_size=group.world_size,
        rank_offset=group.rank_offset,
        backend=number_of(admin_pb2.CollectiveBackend, group.backend),
        group=group.group,
        source_rank=group.source_rank,
    )


def stage_request(
    command: SessionStage, key: str, expected_revision: int | None
) -> admin_pb2.UpdateWeightsRequest:
    """It says nothing but what the stage is: the rest was said when the session began."""
    session = admin_pb2.WeightSession(session_id=command.session_id)
    match command.stage:
        case Chunk() as chunk:
            session.chunk.CopyFrom(_chunk(chunk))
        case CommitSession(chunks=chunks, weight_version=version):
            named = {} if version is None else {"weight_version": version}
            session.commit.CopyFrom(admin_pb2.WeightSessionCommit(chunks=chunks, **named))
        case AbortSession(reason=reason):
            session.abort.SetInParent()
            session.abort.reason = reason
    return admin_pb2.UpdateWeightsRequest(
        idempotency_key=key, expected_revision=expected_revision, session=session
    )


def _chunk(chunk: Chunk) -> admin_pb2.WeightSessionChunk:
    message = admin_pb2.WeightSessionChunk(index=chunk.index)
    match chunk.payload:
        case NcclChunk() as sent:
            message.nccl.CopyFrom(
                admin_pb2.NcclChunk(
                    tensors=[spec_of(spec) for spec in sent.tensors],
                    packed=sent.packed,
                    packed_buffer_bytes=sent.packed_buffer_bytes,
                    packed_buffers=sent.packed_buffers,
                )
            )
        case IpcChunk() as shared:
            message.ipc.CopyFrom(
                admin_pb2.IpcChunk(
                    tensors=[spec_of(spec) for spec in shared.tensors],
                    handles=[
                        admin_pb2.IpcHandle(
                            device_uuid=one.device_uuid,
                            handle=one.handle,
                            offset_bytes=one.offset_bytes,
                        )
                        for one in shared.handles
                    ],
                )
            )
        case DiskChunk(files=files):
            message.disk.files.extend(files)
        case EnginePayloadChunk(parts=parts, load_format=how):
            own = admin_pb2.EnginePayloadChunk(parts=parts, load_format=how)
            message.engine_payload.CopyFrom(own)
    return message


def spec_of(spec: TensorSpec) -> admin_pb2.TensorSpec:
    return admin_pb2.TensorSpec(
        name=spec.name, dtype=number_of(admin_pb2.TensorDtype, spec.dtype), shape=spec.shape
    )
