"""Tensors as they come over the wire, and the fault of a single field."""

from __future__ import annotations

from app.domain.errors import FieldFault, InvalidArgument
from app.domain.kinds import TensorDtype
from app.domain.tensors import TensorSpec
from app.enginekit.vocabulary import TENSOR_DTYPE
from app.rpc.openengine.v1 import admin_pb2


def read_spec(spec: admin_pb2.TensorSpec, pointer: str) -> TensorSpec:
    """Raises InvalidArgument."""
    dtype: TensorDtype = TENSOR_DTYPE.read(spec.dtype, f"{pointer}/dtype")
    return TensorSpec(spec.name, dtype, tuple(spec.shape))


def bad_field(pointer: str, detail: str) -> InvalidArgument:
    return InvalidArgument(
        f"{pointer.removeprefix('/')} {detail}", faults=(FieldFault(pointer, detail),)
    )
