"""Pause, resume and flush."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from app.domain.commands import FlushCaches, Pause
from app.domain.kinds import CacheKind, PauseMode
from app.domain.operation import Progress
from app.enginekit.runtime import Conclusion, Flushed, Order, RuntimeFault
from app.sidecars.carried import Carried
from app.sidecars.faults import remaining_s, told
from app.sidecars.pausing import paused
from app.sidecars.streams import Stream, Streams
from app.sidecars.vllm.answers import Sleeping, flushed
from app.sidecars.vllm.belief import MODES
from app.sidecars.vllm.engine import VllmEngine
from app.sidecars.vllm.offer import CACHES

_TELL_S = 1.0


class CarriedPause(Carried):
    """A drain is waited for while it can still be called off, which is in the preparation: vLLM
    closes at once, answers when all is drained, and stays closed when nobody waits any more."""

    def __init__(self, order: Order, command: Pause, engine: VllmEngine, streams: Streams) -> None:
        super().__init__(order)
        self._mode = command.mode
        self._engine = engine
        self._streams = streams
        self._before = engine.belief.paused
        self._in_flight = 0
        self._mine: tuple[Stream, ...] = ()

    async def prepare(self) -> None:
        self._in_flight = (await self._engine.metrics()).in_flight or 0
        if self._mode is PauseMode.DRAIN:
            self._engine.belief.may_drain(self._in_flight)
            telling = asyncio.create_task(self._tell(self._in_flight))
            try:
                await self._close()
            finally:
                telling.cancel()
                await asyncio.wait({telling})

    async def commit(self) -> None:
        if self._mode is not PauseMode.DRAIN:
            await self._close()
        self._engine.believe(replace(self._engine.belief, paused=self._mode))

    async def _tell(self, total: int) -> None:
        """How far the drain is, for as long as it takes."""
        while True:
            await asyncio.sleep(_TELL_S)
            with suppress(RuntimeFault):
                left = (await self._engine.metrics()).in_flight or 0
                most = max(total, left)
                self.order.report(Progress("draining", most - left, most, "requests"))

    async def _close(self) -> None:
        self._mine = self._streams.running
        self.sent = True
        await self._engine.pause(MODES[self._mode], within_s=remaining_s(self.order.deadline_at))

    async def undo(self) -> None:
        if self._before is not None:
            await self._engine.freeze()
        else:
            await self._engine.resume()
        self._engine.believe(replace(self._engine.belief, paused=self._before))

    async def conclude(self) -> Conclusion:
        return await paused(self._mode, self._mine, self._in_flight)


class CarriedResume(Carried):
    def __init__(self, order: Order, engine: VllmEngine) -> None:
        super().__init__(order)
        self._engine = engine
        self._before = engine.belief.paused
        self._in_flight = 0

    async def prepare(self) -> None:
        self._engine.belief.may_resume()
        metrics = await self._engine.metrics()
        if metrics.sleep not in (None, Sleeping.AWAKE):
            # Somebody else's doing: resumed, it would compute in memory that is away.
            raise RuntimeFault(
                "RESOURCES_RELEASED", "the engine is asleep: wake it", code="FAILED_PRECONDITION"
            )
        self._in_flight = metrics.in_flight or 0

    async def commit(self) -> None:
        self.sent = True
        await self._engine.resume()
        self._engine.believe(replace(self._engine.belief, paused=None))

    async def undo(self) -> None:
        await self._engine.freeze()
        self._engine.believe(replace(self._engine.belief, paused=self._before))

    async def conclude(self) -> Conclusion:
        return Conclusion(requests_continued=self._in_flight)


class CarriedFlush(Carried):
    """An emptied cache costs time and nothing else, so there is nothing to undo."""

    def __init__(self, order: Order, command: FlushCaches, engine: VllmEngine) -> None:
        super().__init__(order)
        self._kinds = command.caches
        self._engine = engine

    async def commit(self) -> None:
        for kind in self._kinds:
            await flush(self._engine, kind)

    async def conclude(self) -> Conclusion:
        return Conclusion(flushed=tuple(Flushed(kind, 0, 0) for kind in self._kinds))


async def flush(engine: VllmEngine, kind: CacheKind, *, recompute: bool = False) -> None:
    """`recompute`: drop what requests in flight have computed too, which they compute again.
    Raises RuntimeFault."""
    again = (("reset_running_requests", "true"),) if recompute else ()
    answer = await engine.post(CACHES[kind], again)
    with told():
        done = flushed(answer)
    if not done:
        raise RuntimeFault(
            "CACHE_IN_USE",
            f"the engine did not empty its {kind.value} cache: requests in flight use it",
            retryable=True,
        )
