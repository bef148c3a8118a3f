"""Files that an engine has left on this machine, read without trusting what stands in the way."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from app.domain.errors import ArtifactDamaged, ArtifactsNotReachable, UnknownArtifact

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """What the engine said of one file. `path` is relative to its root, `sha256` in hex."""

    rank: int
    path: str
    size_bytes: int
    sha256: str
    media_type: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


class OpenFile:
    """A file that is what was said of it. To be closed."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = size_bytes

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, once, from what was opened and not from what the path may name by now."""
        left = self.size_bytes
        while left:
            piece = await asyncio.to_thread(os.read, self._descriptor, min(left, _PIECE))
            if not piece:
                raise ArtifactDamaged("the file was cut while it was read")
            left -= len(piece)
            yield piece

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Artifacts:
    def __init__(self, roots: Mapping[str, Path]) -> None:
        """`roots`: by engine."""
        self._roots = dict(roots)

    def reachable(self, engine_id: str) -> bool:
        return engine_id in self._roots

    async def open(self, engine_id: str, artifact: Artifact) -> OpenFile:
        """Raises ArtifactsNotReachable, UnknownArtifact (it is not there), ArtifactDamaged (it is
        outside of the root, no plain file, or not of that size and SHA-256)."""
        root = self._roots.get(engine_id)
        if root is None:
            raise ArtifactsNotReachable("this gateway can't read the files of that engine")
        opening = asyncio.ensure_future(asyncio.to_thread(_open, root, artifact))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise


def _close_unused(opening: asyncio.Future[OpenFile]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _open(root: Path, artifact: Artifact) -> OpenFile:
    descriptor = _below(root, artifact.path)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ArtifactDamaged("it is no plain file")
        if found.st_size != artifact.size_bytes:
            raise ArtifactDamaged("the file has not the size that the engine gave")
        with os.fdopen(descriptor, "rb", closefd=False, buffering=0) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != artifact.sha256:
            raise ArtifactDamaged("the file has not the SHA-256 that the engine gave")
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return OpenFile(descriptor, artifact.size_bytes)


def _below(root: Path, path: str) -> int:
    """A descriptor of the file. Folder by folder and never through a link, so that nobody who may
    write there can lead this process elsewhere, also not in the moment of opening."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ArtifactDamaged("the engine named a path that is not below its root")
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts[:-1]:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(part, flags, dir_fd=folder)
                os.close(folder)
                folder = inner
            # Without waiting: what poses as a file could be a pipe that nobody writes to.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            return os.open(parts[-1], flags, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError:
        raise UnknownArtifact("the file is no longer where the engine left it") from None
    except OSError as error:
        raise ArtifactDamaged("the file can't be opened as a plain file below the root") from error
