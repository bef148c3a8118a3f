"""Tensors of a safetensors file, as an order can carry them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

from app.commands.ending import usage
from app.commands.http import Json
from app.domain.kinds import TensorDtype

_DTYPES = {
    "F64": TensorDtype.FLOAT64,
    "F32": TensorDtype.FLOAT32,
    "F16": TensorDtype.FLOAT16,
    "BF16": TensorDtype.BFLOAT16,
    "F8_E4M3": TensorDtype.FLOAT8_E4M3FN,
    "F8_E5M2": TensorDtype.FLOAT8_E5M2,
    "I64": TensorDtype.INT64,
    "I32": TensorDtype.INT32,
    "I16": TensorDtype.INT16,
    "I8": TensorDtype.INT8,
    "U8": TensorDtype.UINT8,
    "BOOL": TensorDtype.BOOL,
}
_LENGTH = struct.Struct("<Q")


def tensors_of(path: Path) -> list[Json]:
    """`name dtype shape data` of each. The file: a length, a JSON header of that length, and the
    content that the header's offsets point into. Raises CommandFailed."""
    try:
        content = path.read_bytes()
        (length,) = _LENGTH.unpack_from(content)
        header = json.loads(content[_LENGTH.size : _LENGTH.size + length])
        start = _LENGTH.size + length
        named = {name: one for name, one in header.items() if name != "__metadata__"}
        return [_tensor(name, one, content, start) for name, one in named.items()]
    except OSError as error:
        raise usage(f"--inline: {path} can't be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise usage(f"--inline: {path} is no safetensors file that can be sent") from error


def _tensor(name: str, one: Any, content: bytes, start: int) -> Json:
    begin, end = one["data_offsets"]
    data = content[start + begin : start + end]
    if len(data) != end - begin:
        raise ValueError("the file is cut short")
    return {
        "name": name,
        "dtype": _DTYPES[one["dtype"]].value,
        "shape": one["shape"],
        "data": base64.b64encode(data).decode(),
    }
