"""Updates of weights as they come over the wire."""

from __future__ import annotations

from collections.abc import Iterable

from app.domain.commands import PauseAround, UnderPause, UpdateWeights
from app.domain.kinds import Component, NewRequests
from app.domain.weight_orders import AdmissionRule
from app.domain.weight_sources import (
    DiskWeights,
    DistributedWeights,
    FileDigest,
    InlineTensor,
    InlineWeights,
    SharedMemoryTensor,
    SharedMemoryWeights,
    WeightSource,
)
from app.enginekit.session_requests import read_begin
from app.enginekit.tensor_requests import bad_field, read_spec
from app.enginekit.vocabulary import (
    CACHE_POLICY,
    COLLECTIVE_BACKEND,
    COMPONENT,
    NEW_REQUESTS,
    PAUSE_MODE,
)
from app.rpc.openengine.v1 import admin_pb2


def read_update(request: admin_pb2.UpdateWeightsRequest, model: str | None) -> UpdateWeights:
    """Of a session the first call, BEGIN. Raises InvalidArgument."""
    return UpdateWeights(
        model=model,
        source=_source(request),
        weight_version=request.weight_version,
        cache_policy=CACHE_POLICY.read(request.cache_policy, "/cache_policy"),
        components=_components(request.components),
        admission=_admission(request),
        check_finite=request.check_finite,
    )


def _components(numbers: Iterable[int]) -> tuple[Component, ...]:
    return tuple(
        COMPONENT.read(number, f"/components/{index}") for index, number in enumerate(numbers)
    )


def _admission(request: admin_pb2.UpdateWeightsRequest) -> AdmissionRule:
    match request.WhichOneof("admission"):
        case "under_pause":
            rule = request.under_pause
            return UnderPause(rule.pause_epoch if rule.HasField("pause_epoch") else None)
        case "pause":
            return _pause(request.pause)
        case _:
            raise bad_field("/under_pause", "say under_pause or pause")


def _pause(pause: admin_pb2.PauseAround) -> PauseAround:
    new_requests = NewRequests.HOLD
    if pause.HasField("new_requests"):
        new_requests = NEW_REQUESTS.read(pause.new_requests, "/pause/new_requests")
    return PauseAround(
        mode=PAUSE_MODE.read(pause.mode, "/pause/mode"),
        new_requests=new_requests,
        hold_limit_ms=pause.hold_limit_ms if pause.HasField("hold_limit_ms") else None,
    )


def _source(request: admin_pb2.UpdateWeightsRequest) -> WeightSource:
    match request.WhichOneof("source"):
        case "disk":
            return _disk(request.disk)
        case "tensors":
            return _tensors(request.tensors)
        case "distributed":
            return _distributed(request.distributed)
        case "session":
            return read_begin(request.session)
        case _:
            raise bad_field("/source", "say where the weights come from")


def _disk(disk: admin_pb2.DiskWeights) -> DiskWeights:
    return DiskWeights(
        path=disk.path,
        digests=tuple(FileDigest(digest.name, digest.sha256.hex()) for digest in disk.digests),
    )


def _tensors(tensors: admin_pb2.TensorWeights) -> WeightSource:
    match tensors.WhichOneof("location"):
        case "shared_memory":
            return _shared_memory(tensors.shared_memory)
        case "inline":
            pointer = "/tensors/inline/tensors"
            return InlineWeights(
                tuple(
                    InlineTensor.carrying(read_spec(one.spec, f"{pointer}/{index}/spec"), one.data)
                    for index, one in enumerate(tensors.inline.tensors)
                )
            )
        case _:
            raise bad_field("/tensors", "say shared_memory or inline")


def _shared_memory(memory: admin_pb2.SharedMemoryWeights) -> SharedMemoryWeights:
    found = []
    for index, one in enumerate(memory.tensors):
        pointer = f"/tensors/shared_memory/tensors/{index}"
        spec = read_spec(one.spec, f"{pointer}/spec")
        if one.length_bytes != spec.size_bytes:
            raise bad_field(f"{pointer}/length_bytes", "is not what dtype and shape say")
        found.append(SharedMemoryTensor(spec, one.offset_bytes))
    return SharedMemoryWeights(
        object_name=memory.object_name.removeprefix("/"),
        size_bytes=memory.size_bytes,
        tensors=tuple(found),
        sha256=memory.sha256.hex() or None,
    )


def _distributed(group: admin_pb2.DistributedWeights) -> DistributedWeights:
    pointer = "/distributed"
    return DistributedWeights(
        backend=COLLECTIVE_BACKEND.read(group.backend, f"{pointer}/backend"),
        address=group.address,
        port=group.port,
        world_size=group.world_size,
        rank_offset=group.rank_offset,
        group=group.group,
        source_rank=group.source_rank,
        tensors=tuple(
            read_spec(spec, f"{pointer}/tensors/{index}")
            for index, spec in enumerate(group.tensors)
        ),
    )
