"""The header of a safetensors file: names, dtypes, shapes, and where the bytes lie.

Format: 8 bytes little-endian length, so many bytes of JSON, then the data that `data_offsets`
counts from (github.com/huggingface/safetensors, README "Format"). Read here rather than with the
library so that what is checked and what is loaded are the same open file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from .payload import Refused

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element."""
LONGEST_HEADER = 100_000_000
"""The library's own bound."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. `start` and `end` count bytes from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def form(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


def read_header(data: memoryview, name: str) -> dict[str, Tensor]:
    """The tensors of the file `name` with the bytes `data`, in the order of their bytes.

    Raises: Refused, when the file is cut off, damaged or of a kind not known here.
    """
    if len(data) < 8:
        raise Refused(f"{name} is no safetensors file: it is shorter than a header")
    length = int.from_bytes(data[:8], "little")
    if length > LONGEST_HEADER or 8 + length > len(data):
        raise Refused(f"{name} is no whole safetensors file: its header would end beyond its end")
    try:
        header = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_once)
    except ValueError as error:
        raise Refused(f"{name} is no safetensors file: its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise Refused(f"{name} is no safetensors file: its header is no object")
    header.pop("__metadata__", None)
    tensors = {key: _tensor(value, 8 + length, f"{name}: {key}") for key, value in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    at = 8 + length
    for key, tensor in ordered.items():
        if tensor.start != at:
            raise Refused(f"{name}: the bytes of {key} do not follow on those before")
        at = tensor.end
    if at != len(data):
        raise Refused(f"{name} has {len(data)} bytes, its header speaks of {at}")
    return ordered


def _tensor(given: object, base: int, what: str) -> Tensor:
    entry = given if isinstance(given, Mapping) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise Refused(f"{what}: its dtype is not known here")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise Refused(f"{what}: its shape or place is not given in whole numbers")
    start, end = offsets
    if end - start != math.prod(shape) * SIZES[dtype]:
        raise Refused(f"{what}: so many bytes do not make {dtype} of this shape")
    return Tensor(dtype, tuple(shape), base + start, base + end)


def _are_counts(given: object) -> TypeGuard[list[int]]:
    return isinstance(given, list) and all(
        type(each) is int and 0 <= each < 2**63 for each in given
    )


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice")
    return found
