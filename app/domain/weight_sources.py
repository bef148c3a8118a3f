"""Where the weights of an update come from. Values that make no sense can't be made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import ClassVar, TypeAlias, cast

from app.domain.command import fault
from app.domain.kinds import CollectiveBackend, WeightSourceKind
from app.domain.operation import JsonObject, JsonValue
from app.domain.tensors import TensorSpec, check_unique
from app.domain.weight_sessions import SessionWeights

__all__ = [
    "DiskWeights",
    "DistributedWeights",
    "FileDigest",
    "InlineTensor",
    "InlineWeights",
    "SessionWeights",
    "SharedMemoryTensor",
    "SharedMemoryWeights",
    "TensorSpec",
    "WeightSource",
    "source_document",
    "source_of",
]

# What a tensor takes in a message beside its name and content, and the message beside its tensors.
_SPEC_BYTES = 256
_MESSAGE_BYTES = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _check_sha256(digest: str, pointer: str) -> None:
    if not _SHA256.fullmatch(digest):
        raise fault(pointer, "a SHA-256 is 64 hexadecimal digits")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """`name` is relative to the source's path; `sha256` in lower-case hex."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """Safetensors files below `path`, which the engine checks against its own roots."""

    kind: ClassVar[WeightSourceKind] = WeightSourceKind.DISK
    path: str
    digests: tuple[FileDigest, ...] = ()

    def __post_init__(self) -> None:
        if not self.path or "\0" in self.path:
            raise fault("/source/disk/path", "must be the path of a folder")
        if self.digests:
            check_unique((digest.name for digest in self.digests), "/source/disk/digests")
        for index, digest in enumerate(self.digests):
            pointer = f"/source/disk/digests/{index}"
            name = PurePosixPath(digest.name)
            if name.is_absolute() or ".." in name.parts or "\0" in digest.name:
                raise fault(f"{pointer}/name", "must be below the path of the source")
            _check_sha256(digest.sha256, f"{pointer}/sha256")

    def document(self) -> dict[str, JsonValue]:
        digests: list[JsonValue] = [{"name": d.name, "sha256": d.sha256} for d in self.digests]
        return {"path": self.path, "digests": digests}

    @classmethod
    def of(cls, document: JsonObject) -> DiskWeights:
        digests = cast("list[dict[str, str]]", document["digests"])
        return cls(
            path=cast("str", document["path"]),
            digests=tuple(FileDigest(d["name"], d["sha256"]) for d in digests),
        )


@dataclass(frozen=True, slots=True)
class SharedMemoryTensor:
    spec: TensorSpec
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class SharedMemoryWeights:
    """A POSIX shared memory object on the engine's machine, of the engine's prefix and owner.

    `sha256` is of the whole object; None: not checked.
    """

    kind: ClassVar[WeightSourceKind] = WeightSourceKind.SHARED_MEMORY
    object_name: str
    size_bytes: int
    tensors: tuple[SharedMemoryTensor, ...]
    sha256: str | None = None

    def __post_init__(self) -> None:
        pointer = "/source/tensors/shared_memory"
        if not self.object_name or "/" in self.object_name or "\0" in self.object_name:
            raise fault(f"{pointer}/object_name", "must be a name without slashes")
        check_unique((one.spec.name for one in self.tensors), f"{pointer}/tensors")
        for index, one in enumerate(self.tensors):
            if one.offset_bytes < 0 or one.offset_bytes + one.spec.size_bytes > self.size_bytes:
                raise fault(f"{pointer}/tensors/{index}", "does not lie within the object")
        if self.sha256 is not None:
            _check_sha256(self.sha256, f"{pointer}/sha256")

    def document(self) -> dict[str, JsonValue]:
        tensors: list[JsonValue] = [
            {**one.spec.document(), "offset_bytes": one.offset_bytes} for one in self.tensors
        ]
        return {
            "object_name": self.object_name,
            "size_bytes": self.size_bytes,
            "tensors": tensors,
            "sha256": self.sha256,
        }

    @classmethod
    def of(cls, document: JsonObject) -> SharedMemoryWeights:
        return cls(
            object_name=cast("str", document["object_name"]),
            size_bytes=cast("int", document["size_bytes"]),
            tensors=tuple(
                SharedMemoryTensor(TensorSpec.of(one), cast("int", one["offset_bytes"]))
                for one in cast("list[JsonObject]", document["tensors"])
            ),
            sha256=cast("str | None", document["sha256"]),
        )


@dataclass(frozen=True, slots=True)
class InlineTensor:
    """`data` is row-major and little endian. It goes with the order and is never kept: read back
    from a document it is None, and the SHA-256 stands for it."""

    spec: TensorSpec
    sha256: str
    data: bytes | None = field(default=None, repr=False, compare=False)

    @classmethod
    def carrying(cls, spec: TensorSpec, data: bytes) -> InlineTensor:
        return cls(spec, hashlib.sha256(data).hexdigest(), data)


@dataclass(frozen=True, slots=True)
class InlineWeights:
    kind: ClassVar[WeightSourceKind] = WeightSourceKind.INLINE
    tensors: tuple[InlineTensor, ...]

    def __post_init__(self) -> None:
        pointer = "/source/tensors/inline/tensors"
        check_unique((one.spec.name for one in self.tensors), pointer)
        for index, one in enumerate(self.tensors):
            if one.data is not None and len(one.data) != one.spec.size_bytes:
                raise fault(f"{pointer}/{index}/data", "is not as long as dtype and shape say")

    @property
    def size_bytes(self) -> int:
        return sum(one.spec.size_bytes for one in self.tensors)

    @property
    def content(self) -> bytes | None:
        """All tensors, one after the other. None: read back from a document."""
        parts = [one.data for one in self.tensors]
        return None if None in parts else b"".join(cast("list[bytes]", parts))

    def filled(self, content: bytes) -> InlineWeights:
        """The same with `content` in it. ValueError: it is not theirs."""
        if len(content) != self.size_bytes:
            raise ValueError("the content is not as long as the tensors are")
        filled, at = [], 0
        for one in self.tensors:
            data = content[at : at + one.spec.size_bytes]
            at += one.spec.size_bytes
            filled.append(InlineTensor.carrying(one.spec, data))
        found = InlineWeights(tuple(filled))
        if found != self:
            raise ValueError("the content has not the SHA-256 of the tensors")
        return found

    def check_fits(self, limit_bytes: int) -> None:
        """Whether they go into one message of that size, 0: no limit is told. Raises
        InvalidArgument."""
        overhead = sum(len(one.spec.name) + _SPEC_BYTES for one in self.tensors)
        if limit_bytes and self.size_bytes + overhead + _MESSAGE_BYTES > limit_bytes:
            detail = f"are more than this engine takes in one message ({limit_bytes} bytes)"
            raise fault("/source/tensors/inline/tensors", detail)

    def document(self) -> dict[str, JsonValue]:
        tensors: list[JsonValue] = [
            {**one.spec.document(), "sha256": one.sha256} for one in self.tensors
        ]
        return {"tensors": tensors}

    @classmethod
    def of(cls, document: JsonObject) -> InlineWeights:
        return cls(
            tuple(
                InlineTensor(TensorSpec.of(one), cast("str", one["sha256"]))
                for one in cast("list[JsonObject]", document["tensors"])
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedWeights:
    """A process group that a trainer opens: `world_size` members, the engine's rank r at
    `rank_offset` + r. `source_rank` broadcasts the tensors in their order."""

    kind: ClassVar[WeightSourceKind] = WeightSourceKind.DISTRIBUTED
    backend: CollectiveBackend
    address: str
    port: int
    world_size: int
    rank_offset: int
    group: str
    source_rank: int
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        pointer = "/source/distributed"
        if not self.address or not self.address.isprintable():
            raise fault(f"{pointer}/address", "must be a host name or an address")
        if not 0 < self.port < 65536:
            raise fault(f"{pointer}/port", "must be within 1 and 65535")
        if self.world_size < 2:
            raise fault(f"{pointer}/world_size", "must count the trainer and the engine")
        for name, rank in (("rank_offset", self.rank_offset), ("source_rank", self.source_rank)):
            if not 0 <= rank < self.world_size:
                raise fault(f"{pointer}/{name}", "must be a rank of the group")
        check_unique((spec.name for spec in self.tensors), f"{pointer}/tensors")

    def check_ranks(self, ranks: int) -> None:
        """Whether an engine of so many ranks fits into the group beside the one that sends.
        Raises InvalidArgument."""
        if self.rank_offset + ranks > self.world_size:
            raise fault("/source/distributed/rank_offset", "leaves no room for the engine's ranks")
        if self.rank_offset <= self.source_rank < self.rank_offset + ranks:
            raise fault("/source/distributed/source_rank", "is one of the engine's own ranks")

    def document(self) -> dict[str, JsonValue]:
        return {
            "backend": self.backend.value,
            "address": self.address,
            "port": self.port,
            "world_size": self.world_size,
            "rank_offset": self.rank_offset,
            "group": self.group,
            "source_rank": self.source_rank,
            "tensors": [spec.document() for spec in self.tensors],
        }

    @classmethod
    def of(cls, document: JsonObject) -> DistributedWeights:
        return cls(
            backend=CollectiveBackend(cast("str", document["backend"])),
            address=cast("str", document["address"]),
            port=cast("int", document["port"]),
            world_size=cast("int", document["world_size"]),
            rank_offset=cast("int", document["rank_offset"]),
            group=cast("str", document["group"]),
            source_rank=cast("int", document["source_rank"]),
            tensors=tuple(
                TensorSpec.of(spec) for spec in cast("list[JsonObject]", document["tensors"])
            ),
        )


WeightSource: TypeAlias = (
    DiskWeights | SharedMemoryWeights | InlineWeights | DistributedWeights | SessionWeights
)

_READERS: Mapping[str, Callable[[JsonObject], WeightSource]] = {
    WeightSourceKind.DISK: DiskWeights.of,
    WeightSourceKind.SHARED_MEMORY: SharedMemoryWeights.of,
    WeightSourceKind.INLINE: InlineWeights.of,
    WeightSourceKind.DISTRIBUTED: DistributedWeights.of,
    WeightSourceKind.SESSION: SessionWeights.of,
}


def source_document(source: WeightSource) -> dict[str, JsonValue]:
    return {source.kind.value: source.document()}


def source_of(document: JsonObject) -> WeightSource:
    """Reads back what `source_document` wrote. KeyError or ValueError: not written by it."""
    ((kind, parts),) = document.items()
    return _READERS[kind](cast("JsonObject", parts))
