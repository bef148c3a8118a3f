"""Profiles by torch's profiler, which the engine writes into a folder that it was started with."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path

from app.domain.commands import StartProfile
from app.enginekit.runtime import ProfileArtifact, RuntimeFault
from app.sidecars.vllm.engine import VllmEngine

_RANK = re.compile(r"(?:^|_)rank(\d+)\.")
_LOOK_S = 0.25
# A trace of a few tokens has been seen to take a minute and a half to write.
_EXPORT_S = 3_600.0
_TYPES = {".gz": "application/gzip", ".json": "application/json"}


class Profiling:
    """One at a time, as the kit sees to. `before`: what lay in the folder when it began."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._before: frozenset[str] = frozenset()
        self._bounded = False

    async def start(self, command: StartProfile) -> None:
        found = self._engine.found
        if command.record_shapes and not found.profile_shapes:
            raise _not_configured("shapes are")
        if command.with_stack and not found.profile_stacks:
            raise _not_configured("stacks are")
        self._before = await self._names()
        self._bounded = command.steps is not None
        body = {} if command.steps is None else {"max_iterations": command.steps}
        # A client's abort would leave it recording: what was sent is seen through.
        await self._engine.post("/start_profile", body=body)

    async def over(self) -> None:
        """The engine does not say that its steps are done; that it writes does."""
        if not self._bounded:
            await asyncio.Event().wait()
        while not await self._names() - self._before:  # noqa: ASYNC110 - another process writes
            await asyncio.sleep(_LOOK_S)

    async def finish(self) -> tuple[ProfileArtifact, ...]:
        await self._engine.post("/stop_profile", within_s=_EXPORT_S)
        new = sorted(await self._names() - self._before)
        if not new:
            raise RuntimeFault("NO_ARTIFACT", "the engine has written no trace")
        return await asyncio.to_thread(self._artifacts, new)

    async def drop(self) -> None:
        await self._engine.post("/stop_profile", within_s=_EXPORT_S)
        new = await self._names() - self._before
        await asyncio.to_thread(self._remove, new)

    @property
    def _folder(self) -> Path:
        return Path(self._engine.found.profile_dir or "/nonexistent")

    async def _names(self) -> frozenset[str]:
        return await asyncio.to_thread(self._listed)

    def _listed(self) -> frozenset[str]:
        try:
            return frozenset(one.name for one in self._folder.iterdir() if one.is_file())
        except OSError:
            return frozenset()

    def _artifacts(self, names: list[str]) -> tuple[ProfileArtifact, ...]:
        found = []
        for name in names:
            path = self._folder / name
            rank = _RANK.search(name)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            found.append(
                ProfileArtifact(
                    # Those of the server itself carry no rank; it runs beside the first.
                    rank=int(rank.group(1)) if rank else 0,
                    path=name,
                    size_bytes=path.stat().st_size,
                    sha256=digest,
                    media_type=_TYPES.get(path.suffix, "text/plain"),
                )
            )
        return tuple(found)

    def _remove(self, names: frozenset[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)


def _not_configured(what: str) -> RuntimeFault:
    text = f"{what} recorded only by an engine that was started to record them"
    return RuntimeFault("PROFILE_OPTION_NOT_OFFERED", text, code="INVALID_ARGUMENT")
