"""Profiles of the whole engine: recorded on every rank, handed out as one folder of files.

A folder is written under another name and gets its own when all of its files are on the disk, so
whoever finds one below the root finds it whole. What the ranks wrote is checked and packed in a
process of its own, since torch's profiler reports no failure to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from app.domain.commands import StartProfile
from app.domain.kinds import ProfilerKind
from app.enginekit.runtime import ProfileArtifact, RuntimeFault
from app.reference_engine import messages as m
from app.reference_engine import recording_orders as r
from app.reference_engine.channel import Issued
from app.reference_engine.engine import Engine
from app.reference_engine.errors import CannotServe, OrderRejected, RankLost
from app.reference_engine.group import Group
from app.reference_engine.processes import own_environment, own_module
from app.reference_engine.profile_shelf import ProfileLimits, clear
from app.reference_engine.trace_file import MEDIA_TYPE

_R = TypeVar("_R", bound=m.Result)

# The kit's deadline for the whole profile is the one that counts, and a rank that is gone or hangs
# is found by those who watch it. To come to an end late is no reason to kill a rank.
_NO_DEADLINE_S = 366 * 86_400.0
_CLEANING_S = 5.0
_UNFINISHED = ".unfinished"


@contextlib.contextmanager
def opened_root(root: Path) -> Iterator[Path]:
    """The folder for profiles: made, this process's alone, and without what an earlier life did not
    finish. Raises CannotServe."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CannotServe(f"no profiles at {root}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CannotServe(f"another engine keeps its profiles at {root}") from None
        for left in root.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)
        yield root
    finally:
        os.close(lock)


@dataclass(slots=True)
class _Profile:
    command: StartProfile
    folder: Path  # where it is written
    group: Group  # the ranks that it began on

    @property
    def final(self) -> Path:
        return self.folder.with_suffix("")


class Profiling:
    """``root`` from :func:`opened_root`. One profile at a time, as the kit sees to."""

    def __init__(
        self,
        engine: Engine,
        root: Path,
        about: Mapping[str, str],
        limits: ProfileLimits | None = None,
    ) -> None:
        """``about`` the engine: stands in every file. ``limits``: of what is kept."""
        self._engine = engine
        self._root = root
        self._about = dict(about)
        self._limits = limits or ProfileLimits()
        self._live: dict[str, _Profile] = {}
        self._cleaning: set[asyncio.Task[None]] = set()

    @property
    def kinds(self) -> frozenset[ProfilerKind]:
        device = {ProfilerKind.DEVICE} if self._engine.ready.device == "cuda" else set()
        return frozenset({ProfilerKind.TORCH, ProfilerKind.MEMORY, *device})

    async def start(self, profile_id: str, command: StartProfile) -> None:
        """Returns when every rank records, each from the same step on. Raises RuntimeFault."""
        if command.profiler is not ProfilerKind.TORCH and (
            command.record_shapes or command.with_stack
        ):
            text = f"shapes and stacks are no part of a {command.profiler.value} profile"
            raise RuntimeFault("PROFILE_OPTION_NOT_OFFERED", text)
        group = self._engine.group
        live = _Profile(command, self._root / f"{profile_id}{_UNFINISHED}", group)
        try:
            # Who may read the root may read the profiles in it.
            await asyncio.to_thread(live.folder.mkdir)
        except OSError as error:
            raise _unwritable(error) from error
        self._live[profile_id] = live
        prepare = r.PrepareRecording(
            recording_id=profile_id,
            kind=r.RecordingKind(command.profiler.value),
            record_shapes=command.record_shapes,
            with_stack=command.with_stack,
        )
        begin = r.BeginRecording(recording_id=profile_id, steps=command.steps)
        try:
            await self._ask(live, prepare, m.Done)
            await self._ask(live, begin, m.Done)
        except asyncio.CancelledError:
            self._drop(profile_id)
            raise
        except BaseException:
            await self._dropped(profile_id)
            raise

    async def over(self, profile_id: str) -> None:
        """Returns when the steps are done, or the records have taken the memory they may."""
        await self._ask(self._recorded(profile_id), r.AwaitRecording(profile_id), m.Done)

    async def finish(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        """One file of each rank, checked and on the disk. Raises RuntimeFault."""
        live = self._recorded(profile_id)
        finish = r.FinishRecording(recording_id=profile_id, path=str(live.folder))
        try:
            recorded = await self._ask(live, finish, r.Recorded)
            files = await self._pack(profile_id, live, recorded)
            await asyncio.to_thread(_publish, live, self._limits)
        except asyncio.CancelledError:
            self._drop(profile_id)
            raise
        except OSError as error:
            await self._dropped(profile_id)
            raise _unwritable(error) from error
        except BaseException:
            await self._dropped(profile_id)
            raise
        del self._live[profile_id]
        return tuple(
            ProfileArtifact(
                rank=rank,
                path=f"{live.final.name}/{Path(file['path']).name}",
                size_bytes=file["size_bytes"],
                sha256=bytes.fromhex(file["sha256"]),
                media_type=MEDIA_TYPE,
            )
            for rank, file in zip(live.group.ranks, files, strict=True)
        )

    async def drop(self, profile_id: str) -> None:
        """Recording has stopped, or will with the next that a rank takes from the log; the folder
        goes with it."""
        if profile_id in self._live:
            await self._dropped(profile_id)

    async def close(self) -> None:
        """Once the ranks are gone."""
        for profile_id in tuple(self._live):
            self._drop(profile_id)
        if self._cleaning:
            await asyncio.wait(self._cleaning)

    def _recorded(self, profile_id: str) -> _Profile:
        """Raises RuntimeFault."""
        live = self._live.get(profile_id)
        if live is None:
            raise RuntimeFault("INTERNAL", "there is no such profile")
        return live

    async def _ask(self, live: _Profile, order: r.RecordingOrder, kind: type[_R]) -> list[_R]:
        """Every rank's answer, in rank order."""
        issued = live.group.issue(order)
        try:
            answers = await asyncio.gather(*(_answer(issued, rank) for rank in live.group.ranks))
        except (RankLost, OrderRejected) as error:
            raise self._fault_of(live, error) from error
        found: list[_R] = [answer for answer in answers if isinstance(answer, kind)]
        if len(found) < len(answers):
            raise TypeError(f"a rank did not answer {kind.__name__}")
        return found

    async def _pack(
        self, profile_id: str, live: _Profile, recorded: list[r.Recorded]
    ) -> list[dict[str, Any]]:
        ranks = live.group.ranks
        asked = [
            {
                "path": one.path,
                "about": {
                    **self._about,
                    "profile_id": profile_id,
                    "profiler": live.command.profiler.value,
                    "rank": rank,
                    "world_size": len(ranks),
                    "steps": one.steps,
                    "ended_by": one.ended_by.value,
                },
            }
            for rank, one in zip(ranks, recorded, strict=True)
        ]
        answer = await _in_process(json.dumps(asked).encode())
        match answer:
            case {"files": [*files]}:
                return files
            case {"error": "unwritable", "message": str(message)}:
                raise RuntimeFault("PROFILE_NOT_WRITTEN", message)
        raise RuntimeFault("PROFILE_NOT_WRITTEN", "a rank's trace is not whole")

    def _fault_of(self, live: _Profile, error: RankLost | OrderRejected) -> RuntimeFault:
        """Of a lost group those ranks are named that were the reason."""
        if blamed := live.group.blamed:
            cause = live.group.lost.get(blamed[0], "")
            text = str(RankLost(blamed, cause))
            return RuntimeFault("RANK_LOST", text, retryable=True, ranks=blamed)
        if live.group is not self._engine.group:
            text = "the ranks that recorded gave way to others, in another shape"
            return RuntimeFault("RANKS_REPLACED", text, retryable=True, code="ABORTED")
        ranks = (error.rank,) if isinstance(error, OrderRejected) else ()
        return RuntimeFault("PROFILE_FAILED", str(error), ranks=ranks)

    def _drop(self, profile_id: str) -> asyncio.Task[None]:
        """Stop recording, and leave nothing. In a task of its own: a rank that is still writing is
        waited for, though not by a caller whose time is up."""
        live = self._live.pop(profile_id)
        issued = live.group.issue(r.DropRecording(profile_id))
        task = asyncio.create_task(self._clean(issued, live))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        return task

    async def _dropped(self, profile_id: str) -> None:
        await asyncio.wait({self._drop(profile_id)}, timeout=_CLEANING_S)

    async def _clean(self, issued: Issued, live: _Profile) -> None:
        for rank in live.group.ranks:
            with contextlib.suppress(RankLost, OrderRejected):
                await _answer(issued, rank)
        await asyncio.to_thread(shutil.rmtree, live.folder, ignore_errors=True)


def _answer(issued: Issued, rank: int) -> Coroutine[Any, Any, m.Result]:
    return issued.ack(rank, _NO_DEADLINE_S)


def _publish(live: _Profile, limits: ProfileLimits) -> None:
    os.utime(live.folder)
    os.rename(live.folder, live.final)
    root = os.open(live.final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(root)
    finally:
        os.close(root)
    clear(live.final.parent, limits)


async def _in_process(asked: bytes) -> Any:
    """What ``trace_file`` answers; the process is gone when this returns, however it does."""
    process = await asyncio.create_subprocess_exec(
        *own_module("app.reference_engine.trace_file"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=own_environment(),
    )
    try:
        answer, _ = await process.communicate(asked)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    try:
        return json.loads(answer)
    except ValueError:
        raise RuntimeFault("PROFILE_NOT_WRITTEN", "the traces could not be packed") from None


def _unwritable(error: OSError) -> RuntimeFault:
    return RuntimeFault("PROFILE_NOT_WRITTEN", error.strerror or "the folder can't be written to")
