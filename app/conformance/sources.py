"""Sources of weights that are well-formed and lead nowhere."""

from __future__ import annotations

from typing import Any

from app.rpc.openengine.v1 import admin_pb2 as pb

_DISCARD_PORT = 9  # nothing listens on it any more
_NAME = "conformance"


def inline(dtype: Any = pb.TENSOR_DTYPE_FLOAT32) -> pb.TensorWeights:
    spec = pb.TensorSpec(name="any", dtype=dtype, shape=[1])
    tensors = [pb.InlineTensor(spec=spec, data=bytes(4))]
    return pb.TensorWeights(inline=pb.InlineWeights(tensors=tensors))


def distributed(
    world_size: int, backend: Any = pb.COLLECTIVE_BACKEND_GLOO
) -> pb.DistributedWeights:
    """A group of a trainer and all ranks, which nobody has opened."""
    return pb.DistributedWeights(
        backend=backend,
        address="127.0.0.1",
        port=_DISCARD_PORT,
        world_size=world_size + 1,
        rank_offset=1,
        group=_NAME,
        tensors=[pb.TensorSpec(name="any", dtype=pb.TENSOR_DTYPE_FLOAT32, shape=[1])],
    )


def of(kind: Any, world_size: int) -> dict[str, Any]:
    """The field of an UpdateWeightsRequest, by WeightSourceKind."""
    spec = pb.TensorSpec(name="any", dtype=pb.TENSOR_DTYPE_FLOAT32, shape=[1])
    tensor = pb.SharedMemoryTensor(spec=spec, length_bytes=4)
    segment = pb.SharedMemoryWeights(object_name=_NAME, size_bytes=4, tensors=[tensor])
    begin = pb.WeightSessionBegin(disk=pb.DiskTransfer(path="/nowhere"))
    session = pb.WeightSession(session_id=_NAME, begin=begin)
    fields: dict[Any, dict[str, Any]] = {
        pb.WEIGHT_SOURCE_KIND_DISK: {"disk": pb.DiskWeights(path="/nowhere")},
        pb.WEIGHT_SOURCE_KIND_SHARED_MEMORY: {"tensors": pb.TensorWeights(shared_memory=segment)},
        pb.WEIGHT_SOURCE_KIND_INLINE: {"tensors": inline()},
        pb.WEIGHT_SOURCE_KIND_DISTRIBUTED: {"distributed": distributed(world_size)},
        pb.WEIGHT_SOURCE_KIND_SESSION: {"session": session},
    }
    return fields[kind]


def unknown_payload() -> pb.WeightSession:
    """A session by payloads in a format that no engine has."""
    own = pb.EnginePayloadTransfer(format=f"{_NAME}.no-such-format")
    return pb.WeightSession(session_id=_NAME, begin=pb.WeightSessionBegin(engine_payload=own))
