"""Weights as trainers of SGLang pickle them: tensors that lie in shared memory of theirs, which the
payload names. Nothing of torch is needed to write one, and nothing here reads any."""

from __future__ import annotations

import base64
from collections.abc import Mapping

_REDUCTIONS = "torch.multiprocessing.reductions"


def pickled(tensors: Mapping[str, tuple[int, ...]], handle: str) -> bytes:
    """A list of (name, tensor). `handle`: of the shared memory, another one for each payload."""
    written = b"\x80\x04]"
    for name, shape in tensors.items():
        size = b"(" + b"".join(b"K" + bytes([one]) for one in shape) + b"t"
        storage = _called("rebuild_storage_filename", _none(), _text("manager"), _text(handle),
                          b"K\x10")  # fmt: skip
        typed = _called("rebuild_typed_storage", storage, _text("float32"))
        meta = b"(K\x00" + size + b"(K\x01t\x89t"
        tensor = _called("rebuild_tensor", _none(), typed, meta)
        written += _text(name) + tensor + b"\x86a"
    return written + b"."


def in_base64(payload: bytes) -> str:
    return base64.b64encode(payload).decode("ascii")


def _called(name: str, *arguments: bytes) -> bytes:
    function = _text(_REDUCTIONS) + _text(name) + b"\x93"
    return function + b"(" + b"".join(arguments) + b"tR"


def _none() -> bytes:
    return b"N"


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()
