"""From where an engine takes new weights: what an order may name, checked before any rank reads.

Files lie below allowed roots after all links are resolved. Shared memory is a file directly below
/dev/shm whose name begins with the engine's own prefix and that belongs to the engine's own user.
The ranks check both again on what they have opened. Trainers are met at allowed places alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from app.reference_engine.change_orders import DiskSource, SharedSource, SharedTensor, WeightFile
from app.reference_engine.errors import SourceRefused
from app.reference_engine.rendezvous import RendezvousRule, resolved
from app.reference_engine.segments import SHARED, new_segment
from app.reference_engine.weight_files import safetensors_files

_ALIGNMENT = 64
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class InlineTensor:
    """A tensor whole in the order; ``dtype`` as safetensors spells it, little endian, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePolicy:
    """``roots``: directories; none: nothing from disk. ``shared_prefix``: of segment names.
    ``rendezvous_rules``: where trainers may be met; none: nothing is received from any."""

    roots: tuple[Path, ...] = ()
    shared_prefix: str = "chadburn-"
    rendezvous_rules: tuple[RendezvousRule, ...] = ()

    def disk(self, path: str, sha256: Mapping[str, str] | None = None) -> DiskSource:
        """A safetensors file or a folder with a checkpoint's files. ``sha256``: hex digest by file
        name; a name that is not among the files is refused, a file without one is not checked.

        Blocks on the file system. Raises SourceRefused or CheckpointError.
        """
        wanted = dict(sha256 or {})
        given = self._real(Path(path))
        files = safetensors_files(given) if given.is_dir() else (given,)
        found = []
        for file in files:
            digest = wanted.pop(file.name, None)
            if digest is not None and not (len(digest) == 64 and _HEX.issuperset(digest.lower())):
                raise SourceRefused(f"the sha256 of {file.name!r} is not 64 hexadecimal digits")
            found.append(WeightFile(str(self._real(file)), digest))
        if wanted:
            raise SourceRefused(f"a sha256 for {min(wanted)!r}, which is not among the files")
        return DiskSource(tuple(found))

    def folder(self, path: str) -> Path:
        """Where files are going to be named. Blocks. Raises SourceRefused."""
        return self._real(Path(path))

    def shared(self, segment: str, tensors: Sequence[SharedTensor]) -> SharedSource:
        """A segment that somebody else has written. Raises SourceRefused."""
        if not segment.startswith(self.shared_prefix) or Path(segment).name != segment:
            raise SourceRefused(f"names of segments begin with {self.shared_prefix!r}")
        path = SHARED / segment
        try:
            status = path.lstat()
        except OSError as error:
            raise SourceRefused(f"segment {segment!r}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise SourceRefused(f"segment {segment!r} does not belong to this engine's user")
        return SharedSource(str(path), os.geteuid(), tuple(tensors))

    def rendezvous(self, host: str, port: int) -> str:
        """The numeric address to connect to. Blocks on the resolver. Raises SourceRefused."""
        return resolved(self.rendezvous_rules, host, port)

    def inline(self, tensors: Sequence[InlineTensor]) -> SharedSource:
        """Puts the content into a segment of the engine's own, for :func:`discard` to remove."""
        placed = []
        with new_segment(self.shared_prefix) as file:
            for one in tensors:
                placed.append(SharedTensor(one.name, one.dtype, one.shape, file.tell()))
                file.write(one.content)
        return SharedSource(file.name, os.geteuid(), tuple(placed))

    def room(self, tensors: Sequence[SharedTensor], sizes: Sequence[int]) -> SharedSource:
        """A segment of the engine's own in which each tensor has a place of so many bytes, for
        somebody to write to. The memory is taken at once, so that no write is going to fail.
        Raises SourceRefused where there is too little."""
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        placed = [
            replace(one, offset=begin) for one, begin in zip(tensors, [0, *ends[:-1]], strict=True)
        ]
        with new_segment(self.shared_prefix) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, ends[-1])
            except OSError as error:
                cause = f"no room for {ends[-1]} bytes in {SHARED} ({error.strerror})"
                raise SourceRefused(cause) from error
        return SharedSource(file.name, os.geteuid(), tuple(placed))

    def _real(self, path: Path) -> Path:
        return real_path(path, self.roots)


def real_path(path: Path, roots: Sequence[Path]) -> Path:
    """The path with all links resolved. Raises SourceRefused unless it is below a root."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        real = None
    allowed = [root.resolve() for root in roots]
    # One answer for what is not there and what is not allowed: it is no map of the disk.
    if real is None or not any(real.is_relative_to(root) for root in allowed):
        raise SourceRefused("the path is not there, or not below an allowed root")
    return real


def discard(source: SharedSource) -> None:
    """Remove a segment that :meth:`SourcePolicy.inline` made."""
    Path(source.path).unlink(missing_ok=True)
