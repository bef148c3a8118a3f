"""New weights from where an order says they are, on one rank: only this rank's part is read."""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from app.reference_engine.change_orders import DiskSource, SharedSource
from app.reference_engine.demanded import expected_shapes
from app.reference_engine.errors import CheckpointFileInvalid
from app.reference_engine.host_memory import RunningChecksum
from app.reference_engine.sharding import Layout
from app.reference_engine.tensor_files import DTYPES, Entry, TensorFile
from app.reference_engine.weights import Collected


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A rank's part, complete and checked. ``sha256`` as of :func:`sha256_of`. ``read`` stands for
    the bytes that were read: equal on all ranks if and only if they read the same files in the
    same state."""

    weights: dict[str, Tensor]
    sha256: str
    read: str


def read_source(
    source: DiskSource | SharedSource,
    layout: Layout,
    *,
    check_finite: bool,
    proceed: Callable[[], None],
) -> ReadSource:
    """Raises CheckpointError."""
    read = hashlib.sha256()
    with RunningChecksum(expected_shapes(layout.config)) as checksum:
        collected = Collected(
            layout, check_finite=check_finite, proceed=proceed, taken=checksum.take
        )
        take_source(source, layout, collected, proceed, read.update)
        weights = collected.complete()
        return ReadSource(weights, checksum.hexdigest(proceed), read.hexdigest())


def take_source(
    source: DiskSource | SharedSource,
    layout: Layout,
    collected: Collected,
    proceed: Callable[[], None],
    note: Callable[[bytes], None],
) -> None:
    """Gather the rank's part of what is there, whole or not. ``note`` is told of the bytes that
    were read. Raises CheckpointError."""
    if isinstance(source, SharedSource):
        _take_shared(source, collected, note)
        return
    for number, wanted in enumerate(source.files):
        # The ranks share the checksums among themselves: each file's is taken once.
        mine = number % layout.world_size == layout.rank
        with TensorFile(Path(wanted.path), check=same_place(wanted.path)) as file:
            if wanted.sha256 is not None and mine:
                found = file.sha256(proceed)
                if found != wanted.sha256.lower():
                    raise CheckpointFileInvalid(file.path, f"its sha256 is {found}")
            collected.take_file(file)
            file.check_unchanged()
            note(repr(file.identity).encode())


def _take_shared(source: SharedSource, collected: Collected, note: Callable[[bytes], None]) -> None:
    path = Path(source.path)

    def check(fd: int, status: os.stat_result) -> None:
        same_place(source.path)(fd, status)
        if status.st_uid != source.owner:
            raise CheckpointFileInvalid(path, "the segment belongs to another user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CheckpointFileInvalid(path, "others may write to the segment")

    with TensorFile(path, check=check) as file:
        for one in source.tensors:
            size = DTYPES[one.dtype].itemsize if one.dtype in DTYPES else 0
            length = math.prod(one.shape) * size
            if one.offset < 0 or one.offset + length > file.identity.size:
                raise CheckpointFileInvalid(path, f"tensor {one.name!r} is not whole")
            collected.take(file, one.name, Entry(one.dtype, one.shape, one.offset, length))
        file.check_unchanged()
        note(repr(file.identity).encode())


def same_place(path: str) -> Callable[[int, os.stat_result], None]:
    """A check for :class:`TensorFile`: the path was resolved and allowed by the front end, and a
    link put there since is refused."""

    def check(fd: int, _status: os.stat_result) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") != path:
            raise CheckpointFileInvalid(Path(path), "a link leads elsewhere")

    return check
