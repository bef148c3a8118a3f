"""Weights that the suite reads, damages and hands over: safetensors bytes without an array library.

Source of the format: the description in the safetensors repository (eight bytes of header length,
little endian; a JSON header; then the bytes of all tensors, row-major, little endian).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from app.rpc.openengine.v1 import admin_pb2 as pb

_MAX_HEADER_BYTES = 100_000_000
_D = pb.TensorDtype


@dataclass(frozen=True, slots=True)
class _Dtype:
    """`nan`: the bytes of one; `twin`: a type of the same size that no engine takes for it."""

    number: pb.TensorDtype.ValueType
    size: int
    nan: bytes | None = None
    twin: str | None = None


DTYPES: Mapping[str, _Dtype] = {
    "F64": _Dtype(_D.TENSOR_DTYPE_FLOAT64, 8, b"\0" * 6 + b"\xf8\x7f", "I64"),
    "F32": _Dtype(_D.TENSOR_DTYPE_FLOAT32, 4, b"\0\0\xc0\x7f", "I32"),
    "F16": _Dtype(_D.TENSOR_DTYPE_FLOAT16, 2, b"\0\x7e", "I16"),
    "BF16": _Dtype(_D.TENSOR_DTYPE_BFLOAT16, 2, b"\xc0\x7f", "I16"),
    "F8_E4M3": _Dtype(_D.TENSOR_DTYPE_FLOAT8_E4M3FN, 1, b"\x7f", "I8"),
    "F8_E5M2": _Dtype(_D.TENSOR_DTYPE_FLOAT8_E5M2, 1, b"\x7f", "I8"),
    "I64": _Dtype(_D.TENSOR_DTYPE_INT64, 8),
    "I32": _Dtype(_D.TENSOR_DTYPE_INT32, 4),
    "I16": _Dtype(_D.TENSOR_DTYPE_INT16, 2),
    "I8": _Dtype(_D.TENSOR_DTYPE_INT8, 1),
    "U8": _Dtype(_D.TENSOR_DTYPE_UINT8, 1),
    "BOOL": _Dtype(_D.TENSOR_DTYPE_BOOL, 1),
}
"""By the words of the format."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data` is row-major and little endian, as long as `dtype` and `shape` say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    @property
    def spec(self) -> pb.TensorSpec:
        return pb.TensorSpec(name=self.name, dtype=DTYPES[self.dtype].number, shape=self.shape)


Weights: TypeAlias = tuple[Tensor, ...]


class WeightsUnreadable(Exception):
    """One line."""


# ---- files ----


def files_of(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, or the file itself. Raises WeightsUnreadable."""
    found = tuple(sorted(path.glob("*.safetensors"))) if path.is_dir() else (path,)
    if not found or not all(file.is_file() for file in found):
        raise WeightsUnreadable(f"no safetensors files at {path}")
    return found


def read_weights(path: Path, *, at_most_bytes: int) -> Weights:
    """Raises WeightsUnreadable, also for more than that."""
    files = files_of(path)
    try:
        size = sum(file.stat().st_size for file in files)
        if size > at_most_bytes:
            raise WeightsUnreadable(f"the weights of {size} bytes are more than the suite reads")
        return tuple(tensor for file in files for tensor in parsed(file.read_bytes()))
    except OSError as error:
        raise WeightsUnreadable(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsUnreadable(f"{path} holds no safetensors files") from error


def parsed(raw: bytes) -> list[Tensor]:
    """ValueError, KeyError or TypeError for what is no safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    if length > min(len(raw), _MAX_HEADER_BYTES):
        raise ValueError("the header is longer than the file")
    header = json.loads(raw[8 : 8 + length])
    if not isinstance(header, dict):
        raise TypeError("the header is no object")
    body = memoryview(raw)[8 + length :]
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(int(size) for size in entry["shape"])
        if end > len(body) or end - begin != math.prod(shape) * DTYPES[entry["dtype"]].size:
            raise ValueError(f"{name} is not whole")
        found.append(Tensor(name, entry["dtype"], shape, bytes(body[begin:end])))
    return found


def written(tensors: Sequence[Tensor]) -> bytes:
    """One safetensors file."""
    header: dict[str, object] = {}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(tensor.data)],
        }
        at += len(tensor.data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + b"".join(tensor.data for tensor in tensors)


# ---- other weights, and damaged ones ----


def altered(tensors: Weights) -> Weights:
    """Of the same names, shapes and types, with every tensor's elements in the reverse order."""

    def reversed_(tensor: Tensor) -> Tensor:
        size = DTYPES[tensor.dtype].size
        pieces = [tensor.data[at : at + size] for at in range(0, len(tensor.data), size)]
        return replace(tensor, data=b"".join(reversed(pieces)))

    return tuple(reversed_(tensor) for tensor in tensors)


def without_one(tensors: Weights) -> Weights:
    victim = _victim(tensors)
    return tuple(tensor for tensor in tensors if tensor is not victim)


def misnamed(tensors: Weights) -> Weights:
    return _changed(tensors, lambda tensor: replace(tensor, name=f"{tensor.name}.not.of.the.model"))


def misshapen(tensors: Weights) -> Weights:
    """One tensor has lost its last row."""

    def shorter(tensor: Tensor) -> Tensor:
        rows, *rest = tensor.shape
        row_bytes = len(tensor.data) // rows
        return replace(tensor, shape=(rows - 1, *rest), data=tensor.data[:-row_bytes])

    return _changed(tensors, shorter)


def mistyped(tensors: Weights) -> Weights:
    """One tensor's bytes are called integers."""
    return _changed(tensors, lambda tensor: replace(tensor, dtype=DTYPES[tensor.dtype].twin or ""))


def not_finite(tensors: Weights) -> Weights:
    """One element is not a number."""

    def poisoned(tensor: Tensor) -> Tensor:
        nan = DTYPES[tensor.dtype].nan or b""
        return replace(tensor, data=tensor.data[: -len(nan)] + nan)

    return _changed(tensors, poisoned)


def _changed(tensors: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    victim = _victim(tensors)
    return tuple(change(tensor) if tensor is victim else tensor for tensor in tensors)


def _victim(tensors: Weights) -> Tensor:
    """The last one that can be damaged in every way: an engine that looks at the first alone is
    caught. Raises WeightsUnreadable without any."""
    for tensor in reversed(tensors):
        if DTYPES[tensor.dtype].nan and len(tensor.shape) > 1 and min(tensor.shape) > 1:
            return tensor
    raise WeightsUnreadable("no tensor of the weights is a matrix of floating point numbers")
