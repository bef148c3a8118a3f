"""How a trainer says that weights travel, read into what a weight session says. Nothing is passed
on unread: what has no place there is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from app.domain.capabilities import Capabilities
from app.domain.errors import UnsupportedOperation
from app.domain.kinds import TensorDtype, WeightSourceKind, WeightTransferBackend
from app.domain.tensors import TensorSpec
from app.domain.weight_sessions import (
    DiskChunk,
    DiskTransfer,
    NcclChunk,
    NcclTransfer,
    Payload,
    Transfer,
)
from app.domain.weight_sources import DiskWeights, FileDigest
from app.http.compat.asked import field
from app.http.compat.refusals import BadBody

_MAX_PATH_CHARS = 4096
_GROUP = ("master_address", "master_port", "rank_offset", "world_size")
_TENSORS = ("names", "dtype_names", "shapes")
_PACKED = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
_ON_DISK = ("path", "files", "check_finite")


@dataclass(frozen=True, slots=True)
class Piece:
    """One `update_info`. `transfer`: how it travels, where only the piece says so (from disk);
    `checkpoint`: the same as a source by itself."""

    payload: Payload
    transfer: Transfer | None = None
    checkpoint: DiskWeights | None = None
    check_finite: bool = False


def ways(can: Capabilities) -> frozenset[str]:
    """How weights travel to the engine, by sessions or as one order."""
    found = frozenset(can.weight_sessions) if WeightSourceKind.SESSION in can.weight_sources else []
    whole = (
        {WeightTransferBackend.DISK.value} if WeightSourceKind.DISK in can.weight_sources else []
    )
    return frozenset(found) | frozenset(whole)


def transfer_of(init_info: Mapping[str, Any], offered: Collection[str]) -> Transfer | None:
    """None: each piece says for itself where it lies. Raises Invalid, BadBody, InvalidArgument,
    UnsupportedOperation."""
    if init_info:
        _only(init_info, _GROUP, "init_info")
        _offered(WeightTransferBackend.NCCL, offered)
        return NcclTransfer(
            address=field(init_info, "master_address", str, within="body.init_info"),
            port=_number(init_info, "master_port"),
            world_size=_number(init_info, "world_size"),
            rank_offset=_number(init_info, "rank_offset"),
        )
    if WeightTransferBackend.DISK not in offered:
        raise BadBody(
            f"init_info needs {', '.join(_GROUP)}: weights come from a process group here"
        )
    return None


def piece_of(update_info: Any, transfer: Transfer | None) -> Piece:
    """Raises Invalid, BadBody, InvalidArgument."""
    if isinstance(update_info, list):
        raise BadBody("update_info of each rank by itself is not taken: send one object for all")
    if isinstance(transfer, NcclTransfer):
        _only(update_info, _TENSORS + _PACKED, "update_info")
        return Piece(_broadcast(update_info))
    _only(update_info, _ON_DISK, "update_info")
    path = PurePosixPath(field(update_info, "path", str, within="body.update_info"))
    if not path.is_absolute() or not path.name or not is_path(str(path)):
        raise BadBody("update_info.path must be the absolute path of a file or folder")
    finite = field(update_info, "check_finite", bool, default=False, within="body.update_info")
    digests = field(update_info, "files", dict, default={}, within="body.update_info")
    if not all(isinstance(digest, str) for digest in digests.values()):
        raise BadBody("update_info.files must give a SHA-256 for each file")
    named = tuple(FileDigest(name, digest) for name, digest in digests.items())
    whole = DiskWeights(str(path), named)
    return Piece(DiskChunk((path.name,)), DiskTransfer(str(path.parent)), whole, finite)


def is_path(text: str) -> bool:
    return len(text) <= _MAX_PATH_CHARS and text.isprintable()


def _broadcast(info: Mapping[str, Any]) -> NcclChunk:
    names, dtypes, shapes = (
        field(info, name, list, within="body.update_info") for name in _TENSORS
    )
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise BadBody("names, dtype_names and shapes must be as many, and not none")
    packed = field(info, "packed", bool, default=False, within="body.update_info")
    size, number = (
        field(info, name, int, default=None, within="body.update_info") for name in _PACKED[1:]
    )
    return NcclChunk(
        tensors=tuple(
            _spec(name, dtype, shape)
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ),
        packed=packed,
        packed_buffer_bytes=size if packed else None,
        packed_buffers=number if packed else None,
    )


def _spec(name: Any, dtype: Any, shape: Any) -> TensorSpec:
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if not isinstance(name, str) or not all(
        type(size) is int and 0 <= size < 1 << 53 for size in sizes
    ):
        raise BadBody("names must be texts, and shapes lists of numbers")
    try:
        kind = TensorDtype(str(dtype).removeprefix("torch."))
    except ValueError:
        raise BadBody("dtype_names has one that is not known here") from None
    return TensorSpec(name, kind, tuple(sizes))


def _number(info: Mapping[str, Any], name: str) -> int:
    """Some trainers send their numbers as texts."""
    given = info.get(name)
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 10:
        return int(given)
    return int(field(info, name, int, within="body.init_info"))


def _only(info: Any, known: tuple[str, ...], what: str) -> None:
    if not isinstance(info, dict):
        raise BadBody(f"{what} must be an object")
    if any(name not in known for name in info):
        raise BadBody(f"{what} has a field that is not known here; known: {', '.join(known)}")


def _offered(backend: WeightTransferBackend, offered: Collection[str]) -> None:
    if backend not in offered:
        raise UnsupportedOperation(f"this engine does not take weights by {backend.value}")
