"""Tensors out of safetensors bytes, without mapping them.

A mapped file stays the file's: whoever overwrites it changes live weights, whoever truncates it
kills the process. Here everything is read into memory of our own, a short read is an error, and all
reads, the checksum's too, go through one descriptor, so that they mean the same file.

Source of the format: the description in the safetensors repository (eight bytes of header length,
little endian; a JSON header; then the bytes of all tensors, row-major, little endian).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from app.reference_engine.errors import CheckpointFileInvalid, CheckpointFileMissing
from app.reference_engine.sharding import Cut

_MAX_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 8 << 20
# What a header of somebody's own making can lead to; nested too deep, or with a number like 1e400.
_NONSENSE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)
# The words of the format.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: ``begin`` in bytes from the beginning of the file. ``dtype`` is the
    format's own word, ``size`` the element's in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Tells whether two ranks, or one rank twice, read the same bytes: a file that is written to in
    between has another time of change."""

    device: int
    inode: int
    size: int
    changed_ns: int


class TensorFile:
    """One open file. ``where`` names it in errors; all errors are CheckpointFileInvalid."""

    def __init__(
        self, path: Path, *, check: Callable[[int, os.stat_result], None] | None = None
    ) -> None:
        """``check`` may refuse the opened descriptor before anything is read from it."""
        self.path = path
        try:
            # Not blocking: a named pipe in the place of the file would hold the rank up for ever.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CheckpointFileMissing(path) from None
        except OSError as error:
            raise CheckpointFileInvalid(path, error.strerror or str(error)) from error
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointFileInvalid(path, "not a regular file")
            if check is not None:
                check(self._fd, status)
            self.identity = self._identity()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def entries(self) -> dict[str, Entry]:
        """The header, checked: every tensor lies whole within the file."""
        size = self.identity.size
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise self._invalid("its header is longer than the file")
        try:
            header = json.loads(self._bytes(8, length), object_pairs_hook=_no_twins)
            header.pop("__metadata__", None)
            return {name: self._entry(name, fields, 8 + length) for name, fields in header.items()}
        except _NONSENSE as error:
            raise self._invalid(f"its header can not be read ({error!r})") from error

    def tensor(self, entry: Entry, cut: Cut | None = None) -> Tensor:
        """The tensor, or one rank's part, as stored, in memory of its own."""
        dtype = DTYPES[entry.dtype]
        if cut is None:
            return self._read(entry.begin, entry.shape, dtype)
        row_bytes = entry.length // entry.shape[0] if entry.shape[0] else 0
        if cut.dim == 0:
            return self._read(entry.begin + cut.start * row_bytes, cut.of(entry.shape), dtype)
        # Columns: whole rows pass through a small buffer, since pages can only be read whole.
        part = torch.empty(cut.of(entry.shape), dtype=dtype)
        step = max(1, _PIECE_BYTES // max(1, row_bytes))
        for first in range(0, entry.shape[0], step):
            rows = min(step, entry.shape[0] - first)
            shape = (rows, *entry.shape[1:])
            piece = self._read(entry.begin + first * row_bytes, shape, dtype)
            part[first : first + rows] = piece[:, cut.start : cut.stop]
        return part

    def sha256(self, proceed: Callable[[], None] = lambda: None) -> str:
        """Of the whole file; ``proceed`` is called between pieces and may raise to stop."""
        digest = hashlib.sha256()
        at, size = 0, self.identity.size
        while at < size:
            proceed()
            count = min(_PIECE_BYTES, size - at)
            digest.update(self._bytes(at, count))
            at += count
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raises when the file was written to since it was opened."""
        if self._identity() != self.identity:
            raise self._invalid("it changed while it was read")

    def read_into(self, begin: int, target: Tensor) -> None:
        """Fill a contiguous tensor on the CPU with the bytes at ``begin``."""
        if not target.numel():
            return
        raw: Any = target.view(-1).view(torch.uint8).numpy()
        view = memoryview(raw)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done : done + (1 << 30)]], begin + done)
            except OSError as error:
                raise self._invalid(error.strerror or str(error)) from error
            if count == 0:
                raise self._invalid("it ends in the middle of a tensor")
            done += count

    def _read(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into(begin, tensor)
        return tensor

    def _bytes(self, begin: int, count: int) -> bytes:
        content = b""
        try:
            content = os.pread(self._fd, count, begin)
        except OSError as error:
            raise self._invalid(error.strerror or str(error)) from error
        if len(content) != count:
            raise self._invalid("it is too short")
        return content

    def _entry(self, name: str, fields: Mapping[str, Any], data: int) -> Entry:
        dtype, shape = str(fields["dtype"]), tuple(map(int, fields["shape"]))
        begin, end = map(int, fields["data_offsets"])
        if not 0 <= begin <= end <= self.identity.size - data or min(shape, default=0) < 0:
            raise self._invalid(f"tensor {name!r} is not whole")
        entry = Entry(dtype, shape, data + begin, end - begin)
        if dtype in DTYPES and entry.length != math.prod(shape) * DTYPES[dtype].itemsize:
            raise self._invalid(f"tensor {name!r} has another length than its shape says")
        return entry

    def _identity(self) -> FileIdentity:
        now = os.fstat(self._fd)
        return FileIdentity(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)

    def _invalid(self, cause: str) -> CheckpointFileInvalid:
        return CheckpointFileInvalid(self.path, cause)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of two tensors of one name, one reader takes the first and another the last.
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found
