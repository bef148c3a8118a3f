"""An update of weights on its way to an engine."""

from __future__ import annotations

from app.backends.session_letters import begin_of, spec_of
from app.backends.spelling import number_of
from app.domain.commands import PauseAround, UnderPause, UpdateWeights
from app.domain.weight_sessions import SessionWeights
from app.domain.weight_sources import (
    DiskWeights,
    DistributedWeights,
    InlineTensor,
    InlineWeights,
    SharedMemoryWeights,
)
from app.rpc.openengine.v1 import admin_pb2


def update_request(command: UpdateWeights) -> admin_pb2.UpdateWeightsRequest:
    """TypeError: inline tensors without their content, which would be another order."""
    request = admin_pb2.UpdateWeightsRequest(
        weight_version=command.weight_version,
        cache_policy=number_of(admin_pb2.CachePolicy, command.cache_policy),
        components=[number_of(admin_pb2.Component, part) for part in command.components],
        check_finite=command.check_finite,
    )
    _set_source(request, command)
    match command.admission:
        case UnderPause(pause_epoch=epoch):
            request.under_pause.SetInParent()
            if epoch is not None:
                request.under_pause.pause_epoch = epoch
        case PauseAround(mode=mode, new_requests=rule, hold_limit_ms=limit):
            request.pause.mode = number_of(admin_pb2.PauseMode, mode)
            request.pause.new_requests = number_of(admin_pb2.NewRequests, rule)
            if limit is not None:
                request.pause.hold_limit_ms = limit
    return request


def _set_source(request: admin_pb2.UpdateWeightsRequest, command: UpdateWeights) -> None:
    match command.source:
        case DiskWeights() as disk:
            request.disk.CopyFrom(
                admin_pb2.DiskWeights(
                    path=disk.path,
                    digests=[
                        admin_pb2.FileDigest(name=one.name, sha256=bytes.fromhex(one.sha256))
                        for one in disk.digests
                    ],
                )
            )
        case SharedMemoryWeights() as memory:
            request.tensors.shared_memory.CopyFrom(_shared_memory(memory))
        case InlineWeights(tensors=tensors):
            request.tensors.inline.CopyFrom(_inline(tensors))
        case DistributedWeights() as group:
            request.distributed.CopyFrom(_distributed(group))
        case SessionWeights() as session:
            request.session.CopyFrom(begin_of(session))
        case other:
            raise TypeError(f"{other.kind.value} weights are not sent this way")


def _inline(tensors: tuple[InlineTensor, ...]) -> admin_pb2.InlineWeights:
    inline = admin_pb2.InlineWeights()
    for one in tensors:
        if one.data is None:
            raise TypeError("the content of a tensor did not come with the order")
        inline.tensors.add(spec=spec_of(one.spec), data=one.data)
    return inline


def _shared_memory(memory: SharedMemoryWeights) -> admin_pb2.SharedMemoryWeights:
    return admin_pb2.SharedMemoryWeights(
        object_name=memory.object_name,
        size_bytes=memory.size_bytes,
        tensors=[
            admin_pb2.SharedMemoryTensor(
                spec=spec_of(one.spec),
                offset_bytes=one.offset_bytes,
                length_bytes=one.spec.size_bytes,
            )
            for one in memory.tensors
        ],
        sha256=b"" if memory.sha256 is None else bytes.fromhex(memory.sha256),
    )


def _distributed(group: DistributedWeights) -> admin_pb2.DistributedWeights:
    return admin_pb2.DistributedWeights(
        backend=number_of(admin_pb2.CollectiveBackend, group.backend),
        address=group.address,
        port=group.port,
        world_size=group.world_size,
        rank_offset=group.rank_offset,
        group=group.group,
        source_rank=group.source_rank,
        tensors=[spec_of(spec) for spec in group.tensors],
    )
