"""One profile from its start to its files, beside whatever else the engine does."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import cast

from app.domain.commands import StartProfile
from app.domain.facts import ProfileFact
from app.domain.kinds import FailureEffect, ProfileState
from app.domain.operation import JsonValue, OperationError, Progress
from app.domain.transitions import Cancelled, Completed, Fact, Failed, Progressed
from app.enginekit.execution import insist
from app.enginekit.journal import LiveOperation
from app.enginekit.phases import (
    CancelAsked,
    DeadlinePassed,
    Interrupts,
    Timings,
    deadline_error,
    fault_error,
    unexpected,
)
from app.enginekit.records import Counters
from app.enginekit.runtime import ProfileArtifact, ProfilerRuntime, RuntimeFault
from app.enginekit.state import EngineState

log = logging.getLogger(__name__)


class ProfileRun:
    """The profile is known by the id of its operation. It changes no administrative fact."""

    def __init__(
        self,
        runtime: ProfilerRuntime,
        state: EngineState,
        live: LiveOperation,
        command: StartProfile,
        interrupts: Interrupts,
        timings: Timings,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._live = live
        self._command = command
        self._interrupts = interrupts
        self._timings = timings
        self._id = live.operation.id
        self._stop = asyncio.Event()
        self._moved = asyncio.Event()
        self.reached: ProfileState | None = None  # None: it does not record yet
        self.began = False

    def stop(self) -> None:
        """Record no more, and write the files."""
        self._stop.set()

    async def beyond(self, state: ProfileState | None) -> None:
        """Until it has left that state."""
        while self.reached is state:
            await self._moved.wait()

    async def run(self) -> None:
        try:
            end = await self._end()
        except Exception:
            log.exception("a profile failed for a reason of the kit's own")
            if self.reached is ProfileState.RUNNING:
                await self._abandon()
            end = Failed(error=_internal())
        await self._tell(end)

    async def _end(self) -> Fact:
        try:
            await self._start()
        except RuntimeFault as fault:
            return Failed(error=fault_error(fault))
        except CancelAsked:
            return Cancelled(message="cancelled before it began")
        except DeadlinePassed:
            return Failed(error=deadline_error((), FailureEffect.NONE))
        try:
            await self._interrupts.guard(self._until_over(), cancellable=True)
            await self._move(ProfileState.EXPORTING)
            finishing = self._runtime.finish_profile(self._id)
            artifacts = await self._interrupts.guard(finishing, cancellable=False)
        except RuntimeFault as fault:
            if self.reached is ProfileState.RUNNING:
                await self._abandon()
            return Failed(error=fault_error(fault))
        except CancelAsked:
            await self._abandon()
            return Cancelled(message="cancelled, and its records dropped")
        except DeadlinePassed:
            if self.reached is ProfileState.RUNNING:
                await self._abandon()
            return Failed(error=deadline_error((), FailureEffect.NONE))
        return Completed(result=_result(self._id, self._command, artifacts))

    async def _start(self) -> None:
        starting = self._runtime.start_profile(self._id, self._command)
        await self._interrupts.guard(starting, cancellable=True)
        await self._move(ProfileState.RUNNING)

    async def _until_over(self) -> None:
        """Stopped by somebody, or at its bound."""
        ends = {
            asyncio.ensure_future(self._stop.wait()),
            asyncio.ensure_future(self._runtime.profiled(self._id)),
        }
        duration_ms = self._command.duration_ms
        try:
            done, _ = await asyncio.wait(
                ends,
                timeout=None if duration_ms is None else duration_ms / 1000,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for end in done:
                end.result()
        finally:
            for end in ends:
                end.cancel()

    async def _abandon(self) -> None:
        """Recording costs time and memory on every rank until it is stopped."""
        loop = asyncio.get_running_loop()
        patience = Interrupts(loop.time() + self._timings.rollback_timeout_s, self._timings)
        try:
            await patience.guard(self._runtime.drop_profile(self._id), cancellable=False)
        except Exception:
            log.exception("a profile that is not wanted any more could not be stopped")

    async def _move(self, reached: ProfileState) -> None:
        fact = ProfileFact(self._id, self._command.profiler.value, reached.value)
        phase = "recording" if reached is ProfileState.RUNNING else "exporting"

        def then() -> None:
            self._state.profile_moved(fact)

        progress = Progressed(progress=Progress(phase))
        await insist(self._state, self._live, lambda _: progress, then=then)
        self._reach(reached)

    async def _tell(self, end: Fact) -> None:
        def fact_of(counters: Counters) -> Fact:
            return _at_revision(end, counters.revision)

        await insist(self._state, self._live, fact_of, then=lambda: self._state.profile_moved(None))
        completed = isinstance(end, Completed)
        self._reach(ProfileState.READY if completed else ProfileState.FAILED)

    def _reach(self, reached: ProfileState) -> None:
        self.began = self.began or reached is ProfileState.RUNNING
        self.reached = reached
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def _at_revision(end: Fact, revision: int) -> Fact:
    return replace(cast("Completed | Failed | Cancelled", end), revision=revision)


def _internal() -> OperationError:
    fault = unexpected()
    return OperationError("INTERNAL", fault.reason, fault.message, effect=FailureEffect.UNKNOWN)


def _result(
    profile_id: str, command: StartProfile, artifacts: tuple[ProfileArtifact, ...]
) -> dict[str, JsonValue]:
    files: list[JsonValue] = [
        {
            "rank": artifact.rank,
            "path": artifact.path,
            "size_bytes": artifact.size_bytes,
            "sha256": artifact.sha256.hex(),
            "media_type": artifact.media_type,
        }
        for artifact in artifacts
    ]
    return {
        "changed": True,
        "profile_id": profile_id,
        "kind": command.profiler.value,
        "artifacts": files,
    }
