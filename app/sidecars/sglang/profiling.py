"""Profiles by torch's profiler, into a folder that is made for each of them.

The engine makes the folder itself when it is told to stop, and ends if it can't: so it is made
here, where every user may write, and looked at again before the stop. Writing a trace holds the
scheduler, which has been seen to take a minute.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from app.domain.commands import StartProfile
from app.enginekit.runtime import ProfileArtifact, RuntimeFault
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.traces import Traces

_RANK = re.compile(r"TP-(\d+)")
_EXPORT_S = 3_600.0
_SETTLE_S = 120.0
_EVERYBODY_WRITES = 0o1777


class Profiling:
    """One at a time, as the kit sees to. `root`: below which profiles lie."""

    def __init__(self, engine: SglangEngine, root: Path | None, new_id: Callable[[], str]) -> None:
        self._engine = engine
        self._root = root or Path("/nonexistent")
        self._new_id = new_id
        self._traces = Traces(self._root, _RANK)
        self._bounded = False

    async def start(self, command: StartProfile) -> None:
        """Raises RuntimeFault."""
        name = self._new_id()
        self._traces = Traces(self._root / name, _RANK)
        await asyncio.to_thread(self._make)
        self._bounded = command.steps is not None
        body: dict[str, object] = {
            "output_dir": str(self._traces.folder),
            "profile_id": name,
            # Others are taken at the start, and found out at the stop.
            "activities": ["CPU"] if self._engine.found.device == "cpu" else ["CPU", "GPU"],
            "with_stack": command.with_stack,
            "record_shapes": command.record_shapes,
        }
        if command.steps is not None:
            body["num_steps"] = command.steps
        await self._engine.post("/start_profile", body=body)

    async def over(self) -> None:
        """The engine does not say that its steps are done; that it writes does."""
        if not self._bounded:
            await asyncio.Event().wait()
        await self._traces.begun()

    async def finish(self) -> tuple[ProfileArtifact, ...]:
        """Raises RuntimeFault."""
        await self._stop()
        await self._written()
        found = await self._traces.artifacts()
        if not found:
            raise RuntimeFault("NO_ARTIFACT", "the engine has written no trace")
        folder = self._traces.folder.name
        return tuple(replace(one, path=f"{folder}/{one.path}") for one in found)

    async def drop(self) -> None:
        await self._stop()
        await self._written()  # a rank that finds its folder gone ends the server
        await self._traces.remove()
        await asyncio.to_thread(self._traces.folder.rmdir)

    async def _written(self) -> None:
        """The server answers for its first rank, and of steps that are done it says nothing."""
        self._engine.occupied = True
        try:
            await self._traces.settled(self._engine.found.world_size, _SETTLE_S)
        finally:
            self._engine.occupied = False

    async def _stop(self) -> None:
        """A stop of what has stopped by itself is an error there, and none here."""
        if self._bounded and await self._traces.new():
            return
        await asyncio.to_thread(self._make)
        self._engine.occupied = True
        try:
            await self._engine.post("/stop_profile", within_s=_EXPORT_S)
        except RuntimeFault:
            if not await self._traces.new():
                raise
        finally:
            self._engine.occupied = False

    def _make(self) -> None:
        """Raises RuntimeFault."""
        folder = self._traces.folder
        try:
            folder.mkdir(exist_ok=True)
            folder.chmod(_EVERYBODY_WRITES)
            (folder / ".probe").touch()
            (folder / ".probe").unlink()
        except OSError as error:
            raise RuntimeFault(
                "PROFILE_FOLDER_UNWRITABLE",
                "the folder of profiles cannot be written to, of which the engine would end",
                code="FAILED_PRECONDITION",
            ) from error
