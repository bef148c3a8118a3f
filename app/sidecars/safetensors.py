"""Headers of safetensors files, and NaN in them, without an array library.

Source of the format: the description in the safetensors repository (eight bytes of header length,
little endian; a JSON header; then the bytes of all tensors, row-major, little endian).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_LONGEST_HEADER = 100_000_000
_PIECE = 8 * 1024 * 1024
_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
# Of each element the last byte and the one before it, with the bits that are all set in infinity
# and NaN, and in nothing else.
_EXPONENTS = {"F64": (0x7F, 0xF0), "F32": (0x7F, 0x80), "F16": (0x7C, 0x00), "BF16": (0x7F, 0x80)}
_ENTRY = {"dtype", "shape", "data_offsets"}

INDEX = "model.safetensors.index.json"


class BadWeights(Exception):
    """One line, without a path."""


@dataclass(frozen=True, slots=True)
class TensorAt:
    """`start` and `end` count from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightsFile:
    path: Path
    tensors: Mapping[str, TensorAt]

    @property
    def size_bytes(self) -> int:
        return sum(one.end - one.start for one in self.tensors.values())

    def sha256(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def finite(self) -> str | None:
        """The name of a tensor with something in it that is no finite number; None: all are."""
        with self.path.open("rb") as file:
            for name, tensor in self.tensors.items():
                for piece in _pieces(file, tensor):
                    if infinite(piece, tensor.dtype):
                        return name
        return None


def files_at(path: Path) -> tuple[WeightsFile, ...]:
    """What a checkpoint consists of: one file, or a folder of one, or of those that its index
    names. Blocks on the disk. Raises BadWeights."""
    try:
        paths = _paths(path)
        return tuple(WeightsFile(one, _header(one)) for one in paths)
    except OSError as error:
        raise BadWeights("the weights cannot be read") from error


def _paths(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError):
            raise BadWeights("the index of the weights cannot be read") from None
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise BadWeights("the index of the weights names something other than its own files")
        found = [path / name for name in sorted(names)]
    else:
        found = sorted(path.glob("*.safetensors"))
        if len(found) > 1:
            raise BadWeights("there are several files of weights, and no index of them")
    if not found:
        raise BadWeights("there are no weights at this path")
    if not all(one.is_file() for one in found):  # opening a pipe would wait for its writer
        raise BadWeights("the weights are not all regular files")
    return found


def _header(path: Path) -> dict[str, TensorAt]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _LONGEST_HEADER or 8 + length > size:
            raise BadWeights(f"{path.name} is no whole safetensors file")
        header = _parsed(path.name, file.read(length))
    _check_metadata(path.name, header.pop("__metadata__", None))
    found = {name: _tensor(path.name, one, 8 + length) for name, one in header.items()}
    at = 8 + length
    for one in sorted(found.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if one.start != at:
            raise BadWeights(f"{path.name} has gaps between its tensors")
        at = one.end
    if at != size:
        raise BadWeights(f"{path.name} is {size} bytes long, and its header speaks of {at}")
    return found


def _parsed(file: str, raw: bytes) -> dict[str, Any]:
    """As strictly as the engines' own reader, which takes UTF-8 alone, no constants that JSON does
    not have, and no field twice: what it refuses ends some engines. Raises BadWeights."""
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_once, parse_constant=_no_json)
    except (ValueError, RecursionError):
        raise BadWeights(f"{file} has no header that can be read") from None
    if not isinstance(header, dict):
        raise BadWeights(f"{file} has no header that can be read")
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    texts = [one for one in found.values() if isinstance(one, str)]
    "".join([*found, *texts]).encode()  # half a surrogate pair is no character
    return found


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _check_metadata(file: str, given: Any) -> None:
    """Texts by name, if it is there. Raises BadWeights."""
    texts = given.values() if isinstance(given, dict) else ()
    if not (given is None or isinstance(given, dict)) or not all(type(one) is str for one in texts):
        raise BadWeights(f"{file} has metadata that cannot be read")


def _tensor(file: str, given: Any, base: int) -> TensorAt:
    entry = given if isinstance(given, dict) else {}
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    known = set(entry) == _ENTRY and isinstance(dtype, str) and dtype in _SIZES
    if not known or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise BadWeights(f"{file} describes a tensor that cannot be read")
    start, end = offsets
    if end - start != math.prod(shape) * _SIZES[dtype]:
        raise BadWeights(f"{file} has a tensor of another length than its shape")
    return TensorAt(dtype, tuple(shape), base + start, base + end)


def _counts(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int and one >= 0 for one in given)


def fits(files: tuple[WeightsFile, ...], model: tuple[WeightsFile, ...]) -> None:
    """Whether both hold the same tensors. Raises BadWeights."""
    found = {
        name: (tensor.dtype, tensor.shape)
        for file in files
        for name, tensor in file.tensors.items()
    }
    if sum(len(file.tensors) for file in files) != len(found):
        raise BadWeights("a tensor stands in two files")
    forms_fit(found, model, whole=True)


def forms_fit(
    found: Mapping[str, tuple[str, tuple[int, ...]]],
    model: tuple[WeightsFile, ...],
    *,
    whole: bool,
) -> None:
    """Names with types and shapes. `whole`: all that the model has. Raises BadWeights."""
    wanted = {name: tensor for file in model for name, tensor in file.tensors.items()}
    for name, form in found.items():
        known = wanted.get(name)
        if known is None:
            raise BadWeights(f"the model has no tensor {_shown(name)}")
        if (known.dtype, known.shape) != form:
            raise BadWeights(f"the model has another type or shape of {_shown(name)}")
    lacking = sorted(set(wanted) - set(found)) if whole else []
    if lacking:
        raise BadWeights(f"{len(lacking)} tensors are missing, {_shown(lacking[0])} among them")


def _shown(name: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in name)[:100]


def _pieces(file: BinaryIO, tensor: TensorAt) -> Iterator[bytes]:
    file.seek(tensor.start)
    left = tensor.end - tensor.start
    while left:
        piece = file.read(min(_PIECE, left))
        if not piece:
            raise BadWeights("the weights became shorter while they were read")
        left -= len(piece)
        yield piece


def infinite(data: bytes, dtype: str) -> bool:
    """Whether something in it is no finite number.

    Byte by byte in bulk: of every element the bits of its exponent, and whether all are set."""
    bits = _EXPONENTS.get(dtype)
    if bits is None:
        return False
    size = _SIZES[dtype]
    marks = [
        int.from_bytes(data[size - 1 - place :: size].translate(_all_set(mask)), "little")
        for place, mask in enumerate(bits)
    ]
    return bool(marks[0] & marks[1])


def _all_set(mask: int) -> bytes:
    return bytes(byte & mask == mask for byte in range(256))
