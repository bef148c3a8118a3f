"""Tensors as SGLang takes them: a pickle, in which its unpickler allows tensors and nothing else.

Written by hand, opcode by opcode, with the tensors' bytes in it. What trainers send names shared
memory of theirs instead, which is gone after the first reading, so that the same call once more
ends the engine. Nothing here reads a pickle.

Source of the form: what ``torch.save`` writes of a storage (its form before zip files, which
``torch.load(weights_only=True)`` reads), and how ``torch.Tensor`` is reduced from a storage.
"""

from __future__ import annotations

import base64
import pickle
import struct
from collections.abc import Iterable, Iterator

from app.domain.kinds import TensorDtype
from app.domain.tensors import TensorSpec

# Names of storages, by what is in them. Of the narrow floats there is none with a name.
_STORAGES = {
    TensorDtype.FLOAT64: "DoubleStorage",
    TensorDtype.FLOAT32: "FloatStorage",
    TensorDtype.FLOAT16: "HalfStorage",
    TensorDtype.BFLOAT16: "BFloat16Storage",
    TensorDtype.INT64: "LongStorage",
    TensorDtype.INT32: "IntStorage",
    TensorDtype.INT16: "ShortStorage",
    TensorDtype.INT8: "CharStorage",
    TensorDtype.UINT8: "ByteStorage",
    TensorDtype.BOOL: "BoolStorage",
}
DTYPES = frozenset(_STORAGES)

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_SYSTEM = {
    "protocol_version": _PROTOCOL,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}

Named = tuple[TensorSpec, bytes]


def payload_of(tensors: Iterable[Named]) -> str:
    """A list of (name, tensor), in base64. Raises KeyError for a dtype that is not in `DTYPES`."""
    written = bytearray(b"\x80\x04]")
    for spec, content in tensors:
        written += _text(spec.name) + _tensor(spec, content) + b"\x86a"
    return base64.b64encode(bytes(written + b".")).decode("ascii")


def batches(tensors: Iterable[Named], most_bytes: int) -> Iterator[list[Named]]:
    """In their order, as many together as there is room for; one that is larger comes alone."""
    batch: list[Named] = []
    size = 0
    for spec, content in tensors:
        if batch and size + len(content) > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append((spec, content))
        size += len(content)
    if batch:
        yield batch


def _tensor(spec: TensorSpec, content: bytes) -> bytes:
    """``_rebuild_tensor(storage, offset, size, stride)``."""
    storage = _STORAGES[spec.dtype]
    count = len(content) // spec.dtype.size_bytes
    held = _global("torch.storage", "_load_from_bytes")
    held += _bytes(_saved(storage, count, content)) + b"\x85R"
    arguments = held + _number(0) + _tuple(spec.shape) + _tuple(_strides(spec.shape))
    return _global("torch._utils", "_rebuild_tensor") + b"(" + arguments + b"tR"


def _saved(storage: str, count: int, content: bytes) -> bytes:
    """A storage as a file of its own: what it is, then its bytes behind their number."""
    parts = [pickle.dumps(one, 2) for one in (_MAGIC, _PROTOCOL, _SYSTEM)]
    # ("storage", its class, key, device, elements, no view of another one), by persistent id.
    named = _text("storage") + f"ctorch\n{storage}\n".encode() + _text("0")
    parts.append(b"\x80\x02(" + named + _text("cpu") + _number(count) + b"NtQ.")
    parts.append(pickle.dumps(["0"], 2))
    parts.append(struct.pack("<q", count) + content)
    return b"".join(parts)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


# ---- opcodes ----


def _text(text: str) -> bytes:
    return b"X" + _counted(text.encode())


def _bytes(content: bytes) -> bytes:
    return b"\x8e" + struct.pack("<Q", len(content)) + content


def _counted(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def _number(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


def _tuple(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(_number(one) for one in numbers) + b"t"


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"
