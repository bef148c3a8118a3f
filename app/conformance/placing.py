"""Weights put where an engine can read them, in each way that its profile offers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import uuid4

from app.conformance.tensors import Weights, written
from app.rpc.openengine.v1 import admin_pb2 as pb

_SHARED = Path("/dev/shm")  # noqa: S108 (where the system has its shared memory)
_FILE = "model.safetensors"


class Way(Enum):
    """By the word that case ids have for it."""

    DISK = "disk"
    INLINE = "inline"
    SHARED_MEMORY = "shared-memory"

    @property
    def source(self) -> pb.WeightSourceKind.ValueType:
        return {
            Way.DISK: pb.WEIGHT_SOURCE_KIND_DISK,
            Way.INLINE: pb.WEIGHT_SOURCE_KIND_INLINE,
            Way.SHARED_MEMORY: pb.WEIGHT_SOURCE_KIND_SHARED_MEMORY,
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """`scratch`: a folder that both sides see; `shared_prefix`: of the names of segments."""

    scratch: Path | None = None
    shared_prefix: str | None = None

    @contextmanager
    def put(self, way: Way, weights: Weights, *, cut: bool = False) -> Iterator[dict[str, Any]]:
        """The field of an UpdateWeightsRequest that names them; taken away again at the end.

        `cut`: the second half of their bytes is not there. Raises OSError.
        """
        match way:
            case Way.INLINE:
                yield {"tensors": pb.TensorWeights(inline=_inline(weights, cut=cut))}
            case Way.SHARED_MEMORY:
                with self.segment(self.shared_prefix or "", weights, cut=cut) as shared:
                    yield {"tensors": pb.TensorWeights(shared_memory=shared)}
            case Way.DISK:
                with self.folder(weights, cut=cut) as folder:
                    yield {"disk": pb.DiskWeights(path=str(folder))}

    @contextmanager
    def folder(
        self, weights: Weights, *, cut: bool = False, below: Path | None = None
    ) -> Iterator[Path]:
        parent = below or self.scratch
        assert parent is not None, "the case did not say that it needs it"
        folder = parent / f"conformance-{uuid4().hex[:12]}"
        folder.mkdir()
        file = folder / _FILE
        try:
            raw = written(weights)
            file.write_bytes(raw[: len(raw) // 2] if cut else raw)
            # Whoever serves as another user has to be able to read it, as of any checkpoint.
            folder.chmod(0o755)
            file.chmod(0o644)
            yield folder
        finally:
            file.unlink(missing_ok=True)
            folder.rmdir()

    @contextmanager
    def segment(
        self, prefix: str, weights: Weights, *, cut: bool = False
    ) -> Iterator[pb.SharedMemoryWeights]:
        path = _SHARED / f"{prefix}conformance-{uuid4().hex[:12]}"
        whole = b"".join(tensor.data for tensor in weights)
        there = whole[: len(whole) // 2] if cut else whole
        try:
            path.touch(0o600, exist_ok=False)
            path.write_bytes(there)
            shared = pb.SharedMemoryWeights(
                object_name=path.name,
                size_bytes=len(whole),
                sha256=b"" if cut else hashlib.sha256(whole).digest(),
            )
            at = 0
            for tensor in weights:
                shared.tensors.add(spec=tensor.spec, offset_bytes=at, length_bytes=len(tensor.data))
                at += len(tensor.data)
            yield shared
        finally:
            path.unlink(missing_ok=True)


def _inline(weights: Weights, *, cut: bool) -> pb.InlineWeights:
    inline = pb.InlineWeights()
    for tensor in weights:
        inline.tensors.add(spec=tensor.spec, data=tensor.data)
    if cut:
        last = inline.tensors[-1]
        last.data = last.data[: len(last.data) // 2]
    return inline
