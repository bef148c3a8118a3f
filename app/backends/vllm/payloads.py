"""The JSON that goes with a transfer of weights: one schema for each way of travelling, made of
values that were read before. Nothing is passed on that is not understood here. Pure.

Field names are those of vLLM's transfer backends `nccl`, and of the plugin's `disk`.
"""

from __future__ import annotations

import json
from posixpath import join

from app.backends.vllm.readings import EngineReading
from app.backends.vllm.refusals import refused
from app.domain.kinds import CollectiveBackend
from app.domain.operation import JsonObject, JsonValue
from app.domain.weight_sessions import (
    DiskChunk,
    DiskTransfer,
    NcclChunk,
    NcclTransfer,
    Payload,
    Transfer,
)
from app.domain.weight_sources import DiskWeights


def init_infos(transfer: Transfer | DiskWeights, reading: EngineReading) -> list[bytes]:
    """One for each member. Raises EngineRefused for what vLLM's transfer can't be told."""
    if not isinstance(transfer, NcclTransfer):
        return [b"{}"] * len(reading.members)
    if transfer.backend is not CollectiveBackend.NCCL or transfer.group:
        message = "vLLM opens one group of its own, by NCCL"
        raise refused("INVALID_ARGUMENT", "TRANSFER_NOT_OFFERED", message)
    if transfer.source_rank != 0:
        message = "vLLM receives from rank 0 of the group"
        raise refused("INVALID_ARGUMENT", "TRANSFER_NOT_OFFERED", message)
    return [
        _bytes(
            {
                "master_address": transfer.address,
                "master_port": transfer.port,
                "rank_offset": transfer.rank_offset + before,
                "world_size": transfer.world_size,
            }
        )
        for before in _offsets(reading)
    ]


def _offsets(reading: EngineReading) -> list[int]:
    """How many ranks of the group come before each member's first. A member that was started as
    one of several adds its own place itself."""
    offsets, before = [], 0
    for member in reading.members:
        knows = member.server.parallelism.data_parallel_size > 1
        offsets.append(0 if knows else before)
        before += reading.width(member)
    return offsets


def update_info(
    transfer: Transfer | DiskWeights, chunk: Payload | None, *, check_finite: bool
) -> bytes:
    """The same for all members. `chunk` None: the whole of what `transfer` names."""
    match transfer, chunk:
        case NcclTransfer(), NcclChunk():
            return _bytes(_nccl(chunk))
        case DiskTransfer(path=path), DiskChunk(files=files):
            # Of several files the index beside them says what each is for.
            one = join(path, files[0]) if len(files) == 1 else path
            return _bytes(_disk(one, {}, check_finite=check_finite))
        case DiskWeights(path=path, digests=digests), None:
            named: dict[str, JsonValue] = {digest.name: digest.sha256 for digest in digests}
            return _bytes(_disk(path, named, check_finite=check_finite))
    raise refused("INVALID_ARGUMENT", "TRANSFER_NOT_OFFERED", "a chunk of another kind")


def _nccl(chunk: NcclChunk) -> JsonObject:
    info: dict[str, JsonValue] = {
        "names": [spec.name for spec in chunk.tensors],
        "dtype_names": [spec.dtype.value for spec in chunk.tensors],
        "shapes": [list(spec.shape) for spec in chunk.tensors],
    }
    if chunk.packed:
        info["packed"] = True
        if chunk.packed_buffer_bytes is not None:
            info["packed_buffer_size_bytes"] = chunk.packed_buffer_bytes
        if chunk.packed_buffers is not None:
            info["packed_num_buffers"] = chunk.packed_buffers
    return info


def _disk(path: str, digests: dict[str, JsonValue], *, check_finite: bool) -> JsonObject:
    info: dict[str, JsonValue] = {"path": path}
    if digests:
        info["files"] = digests
    if check_finite:
        info["check_finite"] = True
    return info


def _bytes(info: JsonObject) -> bytes:
    return json.dumps(info, separators=(",", ":")).encode()
