"""Safetensors files, written by hand: torch is not needed to say what is wrong with one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

SIZES = {"BF16": 2, "F32": 4, "I64": 8}

Form = tuple[str, list[int]]


def file_of(tensors: Mapping[str, Form], **metadata: str) -> bytes:
    """A file in which every byte of the n-th tensor is n."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at, data = 0, b""
    for number, (name, (dtype, shape)) in enumerate(tensors.items()):
        size = math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at, data = at + size, data + bytes([number]) * size
    return with_header(header, data)


def with_header(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def folder_of(folder: Path, shards: Mapping[str, Mapping[str, Form]]) -> Path:
    """Shards with the index that belongs to them."""
    folder.mkdir()
    for name, tensors in shards.items():
        (folder / name).write_bytes(file_of(tensors))
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
