"""Files that an engine's profiler writes into a folder, which is seen from here."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path

from app.enginekit.runtime import ProfileArtifact

_LOOK_S = 0.5
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

    async def settled(self, files: int, within_s: float) -> None:
        """Until there are so many, and none has grown between two looks: who writes them does not
        say that it is done. Not in time: whatever there is has to do."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + within_s
        before: dict[str, int] = {}
        while loop.time() < give_up_at:
            sizes = await asyncio.to_thread(self._sizes)
            if len(sizes) >= files and all(sizes.values()) and sizes == before:
                return
            before = sizes
            await asyncio.sleep(_LOOK_S)

    def _sizes(self) -> dict[str, int]:
        new = self._listed() - self._before
        try:
            return {name: (self.folder / name).stat().st_size for name in new}
        except OSError:  # one was taken away between the two looks
            return {}

    async def artifacts(self) -> tuple[ProfileArtifact, ...]:
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
