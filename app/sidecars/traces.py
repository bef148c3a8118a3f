"""Files that an engine's profiler writes into a folder, which is seen from here."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
import zlib
from pathlib import Path

from app.enginekit.runtime import ProfileArtifact, RuntimeFault

_LOOK_S = 0.5
_FIRST_S = 0.25
_PIECE_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_TYPES = {".gz": "application/gzip", ".json": "application/json"}


class Traces:
    """New ones since `mark`. `rank`: how a file's name tells whose it is; one without a rank is
    the server's own, which runs beside the first."""

    def __init__(self, folder: Path, rank: re.Pattern[str]) -> None:
        self.folder = folder
        self._rank = rank
        self._before: frozenset[str] = frozenset()

    async def mark(self) -> None:
        self._before = await self._names()

    async def new(self) -> list[str]:
        return sorted(await self._names() - self._before)

    async def begun(self) -> None:
        """Until the first is being written."""
        while not await self.new():  # noqa: ASYNC110 - another process writes
            await asyncio.sleep(_FIRST_S)

    async def settled(self, files: int, within_s: float) -> bool:
        """Whether there came to be so many, each written to its end: who writes them does not say
        that it is done. Waits as long as something grows, and `within_s` longer."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + within_s
        before: dict[str, int] = {}
        while loop.time() < give_up_at:
            sizes = await asyncio.to_thread(self._sizes)
            if sizes != before:
                give_up_at = loop.time() + within_s
            elif len(sizes) >= files and all(sizes.values()) and await self._are_whole():
                return True
            before = sizes
            await asyncio.sleep(_LOOK_S)
        return False

    async def _are_whole(self) -> bool:
        names = await self.new()
        return await asyncio.to_thread(lambda: all(_is_whole(self.folder / n) for n in names))

    def _sizes(self) -> dict[str, int]:
        new = self._listed() - self._before
        try:
            return {name: (self.folder / name).stat().st_size for name in new}
        except OSError:  # one was taken away between the two looks
            return {}

    async def artifacts(self) -> tuple[ProfileArtifact, ...]:
        """Raises RuntimeFault: one is cut short, whose digest would be that of no trace."""
        if not await self._are_whole():
            raise RuntimeFault("NO_ARTIFACT", "the engine has not written a trace to its end")
        return await asyncio.to_thread(self._artifacts, await self.new())

    async def remove(self) -> None:
        await asyncio.to_thread(self._remove, await self.new())

    async def _names(self) -> frozenset[str]:
        return await asyncio.to_thread(self._listed)

    def _listed(self) -> frozenset[str]:
        try:
            return frozenset(
                one.name
                for one in self.folder.iterdir()
                if one.is_file() and not one.name.startswith(".")
            )
        except OSError:
            return frozenset()

    def _artifacts(self, names: list[str]) -> tuple[ProfileArtifact, ...]:
        found = []
        for name in names:
            path = self.folder / name
            rank = self._rank.search(name)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            found.append(
                ProfileArtifact(
                    rank=int(rank.group(1)) if rank else 0,
                    path=name,
                    size_bytes=path.stat().st_size,
                    sha256=digest,
                    media_type=_TYPES.get(path.suffix, "text/plain"),
                )
            )
        return tuple(found)

    def _remove(self, names: list[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """A packed one tells its end. Blocks on the disk."""
    if path.suffix != ".gz":
        return True
    if path.stat().st_size < len(_GZIP_MAGIC):
        return False
    try:
        with gzip.open(path) as file:
            while file.read(_PIECE_BYTES):
                pass
    except EOFError:
        return False
    except (OSError, zlib.error):  # something else than was thought
        return True
    return True
