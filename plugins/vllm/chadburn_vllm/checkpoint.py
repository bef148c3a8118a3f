"""A checkpoint on disk: one safetensors file, or a folder of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .header import Tensor, read_header
from .payload import Refused, is_file_name

INDEX = "model.safetensors.index.json"
LONGEST_INDEX = 100_000_000


@dataclass(frozen=True)
class File:
    """An open file: what is looked at and what is loaded are the same bytes, whatever is renamed
    over its name. Bytes that somebody overwrites in place while an update runs can't be told."""

    name: str
    data: mmap.mmap
    tensors: Mapping[str, Tensor]

    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """All files of one checkpoint. No tensor stands in two of them."""

    files: tuple[File, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for file in self.files for name, tensor in file.tensors.items()}

    def verify(self, digests: Mapping[str, str]) -> None:
        """Raises: Refused, unless `digests` has exactly these files with exactly these bytes."""
        if mine := {file.name for file in self.files} ^ set(digests):
            raise Refused(f"update_info.files and the checkpoint differ in {_few(mine)}")
        for file in self.files:
            if file.sha256() != digests[file.name]:
                raise Refused(f"{file.name} does not have the SHA-256 that was asked for")


def open_checkpoint(path: str, roots: Sequence[str] | None) -> Checkpoint:
    """Open what lies at `path`, every file of it below one of `roots` (None: wherever it is).

    A folder has either an index (model.safetensors.index.json) that names its files, or exactly one
    safetensors file. Links are followed first and judged by where they lead.

    Raises: Refused.
    """
    real = os.path.realpath(path)
    _allow(real, roots)
    if not os.path.exists(real):
        raise Refused("there is nothing at this path")
    if not os.path.isdir(real):
        if not is_file_name(os.path.basename(real)) and not is_file_name(os.path.basename(path)):
            raise Refused("update_info.path is neither a folder nor a .safetensors file")
        return Checkpoint((_open(path, roots),))
    if os.path.exists(os.path.join(real, INDEX)):
        return _indexed(real, roots)
    names = sorted(name for name in os.listdir(real) if is_file_name(name))
    if not names:
        raise Refused("there is no .safetensors file in this folder")
    if len(names) > 1:
        raise Refused(f"there are {len(names)} .safetensors files in this folder and no {INDEX}")
    return Checkpoint((_open(os.path.join(real, names[0]), roots),))


def _indexed(folder: str, roots: Sequence[str] | None) -> Checkpoint:
    with _opened(os.path.join(folder, INDEX), roots) as (handle, size):
        if size > LONGEST_INDEX:
            raise Refused(f"{INDEX} is too long")
        text = os.read(handle, size)
    try:
        index = json.loads(text)
        weight_map = dict(index["weight_map"])
    except (ValueError, TypeError, KeyError):
        raise Refused(f"{INDEX} has no weight_map") from None
    names = set(weight_map.values())
    if not names or not all(isinstance(name, str) and is_file_name(name) for name in names):
        raise Refused(f"{INDEX} names what is no .safetensors file beside it")
    files = tuple(_open(os.path.join(folder, name), roots) for name in sorted(names))
    for file in files:
        listed = {tensor for tensor, name in weight_map.items() if name == file.name}
        if other := listed ^ set(file.tensors):
            raise Refused(f"{INDEX} and {file.name} differ in {_few(other)}")
    return Checkpoint(files)


def _open(path: str, roots: Sequence[str] | None) -> File:
    name = os.path.basename(path)
    with _opened(path, roots) as (handle, size):
        if not size:
            raise Refused(f"{name} is empty")
        # Private pages: torch wants memory that it could write to, and the file stays as it is.
        data = mmap.mmap(handle, size, access=mmap.ACCESS_COPY)
    return File(name, data, read_header(memoryview(data), name))


@contextlib.contextmanager
def _opened(path: str, roots: Sequence[str] | None) -> Iterator[tuple[int, int]]:
    """A descriptor and the size. Where it leads is judged by what was opened: between looking at a
    name and opening it, the name can come to mean another file."""
    name = os.path.basename(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Refused(f"{name} can't be opened: {error.strerror}") from None
    try:
        _allow(os.readlink(f"/proc/self/fd/{handle}"), roots)
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{name} is no regular file")
        yield handle, status.st_size
    finally:
        os.close(handle)


def _allow(real: str, roots: Sequence[str] | None) -> None:
    # The message names no path: whether something is there is not told to who may not read it.
    if roots is not None and not any(
        os.path.commonpath((real, root)) == root for root in map(os.path.realpath, roots)
    ):
        raise Refused("this path is not below an allowed root")


def _few(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
