"""Release and restore, and the pauses around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.domain.commands import Pause, ReleaseResources, RestoreResources
from app.domain.kinds import PauseMode, ResourceKind
from app.domain.operation import OperationWarning
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.carried import Carried
from app.sidecars.streams import Stream, Streams, over
from app.sidecars.trtllm.discovery import RELEASE, RESTORE
from app.sidecars.trtllm.engine import SIGNATURE_REFUSED, NothingDone, TrtllmEngine
from app.sidecars.trtllm.memory import Memory, State

OPENED = OperationWarning(
    "ADMISSION_OPENED",
    "the engine takes requests again by itself as soon as nothing is released: it knows no pause",
)
KV_NOT_KEPT = OperationWarning(
    "KV_CACHE_NOT_KEPT",
    "unless the engine was told to keep it, what it had cached is gone: later requests compute it"
    " again",
)
# Of the time that the kit gives a rollback.
_UNDO_S = 20.0
_ENDED = "the engine was paused, which ended all requests in flight"


class CarriedPause(Carried):
    """The gate in front of the sidecar's own listener is all that holds requests back. A release
    makes one of its own for that listener: the engine closes by itself."""

    def __init__(self, order: Order, command: Pause, streams: Streams) -> None:
        super().__init__(order)
        self._mode = command.mode
        self._streams = streams
        self._mine: tuple[Stream, ...] = ()

    async def commit(self) -> None:
        if self._mode is PauseMode.ABORT:
            self._mine = self._streams.running
            await self._streams.end(self._mine, _ENDED)

    async def conclude(self) -> Conclusion:
        await over(self._mine)
        return Conclusion(requests_aborted=sum(one.aborted for one in self._mine))


class CarriedResume(Carried):
    """The engine itself was never closed, or has opened already."""


class _Moving(Carried):
    def __init__(self, order: Order, tags: frozenset[str], engine: TrtllmEngine) -> None:
        super().__init__(order)
        self._tags = tags
        self._engine = engine
        self._before: Memory | None = None

    async def _move(self, path: str, shows: Callable[[Memory], bool]) -> None:
        """What the engine did not take needs no undoing, which it might not take either. Of a
        number that was used before it may have taken the first call: whatever is in between may
        have made it twice."""
        self.sent = True
        try:
            await self._engine.move(path, self._tags, self.order.deadline_at, shows)
        except NothingDone as refusal:
            self.sent = refusal.reason == SIGNATURE_REFUSED and await self._moved()
            raise

    async def _moved(self) -> bool:
        try:
            return await self._engine.read_memory() != self._before
        except RuntimeFault:
            return False


class CarriedRelease(_Moving):
    def __init__(self, order: Order, command: ReleaseResources, engine: TrtllmEngine) -> None:
        self._kinds = frozenset(command.resources)
        super().__init__(order, engine.tags.tags_of(self._kinds), engine)

    async def prepare(self) -> None:
        self._before = await self._engine.read_memory()
        self._before.may_release(self._tags)

    async def commit(self) -> None:
        """The engine lets its requests finish first, others' too, which may take its time."""
        await self._move(RELEASE, self._shows)

    def _shows(self, memory: Memory) -> bool:
        return memory.state is State.PARKED and memory.parked >= self._tags

    async def undo(self) -> None:
        """A drain that nobody waits for any more goes on in the engine, and parks at its end."""
        memory = await self._engine.settled(_undo_until())
        if memory == self._before:
            return
        memory.may_restore()
        await self._engine.move(
            RESTORE, self._tags, _undo_until(), lambda after: after == self._before
        )

    async def conclude(self) -> Conclusion:
        kv = ResourceKind.KV_CACHE in self._kinds
        return Conclusion(warnings=(KV_NOT_KEPT,) if kv else ())


class CarriedRestore(_Moving):
    def __init__(self, order: Order, command: RestoreResources, engine: TrtllmEngine) -> None:
        super().__init__(order, engine.tags.tags_of(frozenset(command.resources)), engine)

    async def prepare(self) -> None:
        self._before = await self._engine.read_memory()
        self._before.may_restore()

    async def commit(self) -> None:
        await self._move(RESTORE, self._shows)

    def _shows(self, memory: Memory) -> bool:
        return memory.state is not State.FAILED and not memory.parked & self._tags

    async def undo(self) -> None:
        if await self._engine.settled(_undo_until()) != self._before:
            raise RuntimeFault("NOT_UNDONE", "what was restored is not given back for a failure")

    async def conclude(self) -> Conclusion:
        opened = self._engine.memory.state is State.RUNNING and not self._engine.only_way
        return Conclusion(warnings=(OPENED,) if opened else ())


def _undo_until() -> float:
    return asyncio.get_running_loop().time() + _UNDO_S
