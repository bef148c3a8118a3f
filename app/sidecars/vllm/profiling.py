"""Profiles by torch's profiler, which the engine writes into a folder that it was started with."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from app.domain.commands import StartProfile
from app.enginekit.runtime import ProfileArtifact, RuntimeFault
from app.sidecars.traces import Traces
from app.sidecars.vllm.engine import VllmEngine

_RANK = re.compile(r"(?:^|_)rank(\d+)\.")
# A trace of a few tokens has been seen to take a minute and a half to write.
_EXPORT_S = 3_600.0


class Profiling:
    """One at a time, as the kit sees to."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._traces = Traces(Path(engine.found.profile_dir or "/nonexistent"), _RANK)
        self._bounded = False

    async def start(self, command: StartProfile) -> None:
        found = self._engine.found
        if command.record_shapes and not found.profile_shapes:
            raise _not_configured("shapes are")
        if command.with_stack and not found.profile_stacks:
            raise _not_configured("stacks are")
        await self._traces.mark()
        self._bounded = command.steps is not None
        body = {} if command.steps is None else {"max_iterations": command.steps}
        # A client's abort would leave it recording: what was sent is seen through.
        await self._engine.post("/start_profile", body=body)

    async def over(self) -> None:
        """The engine does not say that its steps are done; that it writes does."""
        if not self._bounded:
            await asyncio.Event().wait()
        await self._traces.begun()

    async def finish(self) -> tuple[ProfileArtifact, ...]:
        await self._engine.post("/stop_profile", within_s=_EXPORT_S)
        if not await self._traces.new():
            raise RuntimeFault("NO_ARTIFACT", "the engine has written no trace")
        return await self._traces.artifacts()

    async def drop(self) -> None:
        await self._engine.post("/stop_profile", within_s=_EXPORT_S)
        await self._traces.remove()


def _not_configured(what: str) -> RuntimeFault:
    text = f"{what} recorded only by an engine that was started to record them"
    return RuntimeFault("PROFILE_OPTION_NOT_OFFERED", text, code="INVALID_ARGUMENT")
