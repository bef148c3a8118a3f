"""Pause, resume and flush."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from app.domain.commands import FlushCaches, Pause
from app.domain.kinds import CacheKind, PauseMode
from app.domain.operation import OperationWarning, Progress
from app.enginekit.runtime import Conclusion, Flushed, Order, RuntimeFault
from app.sidecars.carried import Carried
from app.sidecars.faults import remaining_s
from app.sidecars.pausing import paused
from app.sidecars.sglang.belief import HOLDS, Belief
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.streams import Stream, Streams

_LOOK_S = 0.2
_SPACING_S = (0.25, 0.5, 1.0, 2.0)
# Left of the time that an order has, to say what it waited for.
_MARGIN_S = 1.0

FIRST_RANK_ALONE = OperationWarning(
    "FIRST_RANK_ALONE",
    "of several data-parallel ranks the engine tells what the first one did, and nothing of others",
)


class CarriedPause(Carried):
    """SGLang has no mode that lets requests finish, so a drain waits until none is in flight and
    then holds the scheduler. What comes in between goes back into the queue, as if it had come a
    moment later: nothing is ended, and nothing holds on to memory."""

    def __init__(self, order: Order, command: Pause, engine: SglangEngine, streams: Streams):
        super().__init__(order)
        self._mode = command.mode
        self._engine = engine
        self._streams = streams
        self._before: Belief = engine.belief
        self._in_flight = 0
        self._mine: tuple[Stream, ...] = ()

    async def prepare(self) -> None:
        engine = self._engine
        await engine.same()
        self._in_flight = (await engine.loads()).in_flight
        if self._mode is PauseMode.DRAIN:
            if self._before.paused is PauseMode.KEEP:
                await self._refuse_frozen()
            else:
                await self._drain()

    async def _refuse_frozen(self) -> None:
        """How many are frozen cannot be read; that none is, a flush would prove."""
        if self._streams.running or self._in_flight:
            raise RuntimeFault(
                "REQUESTS_FROZEN",
                "requests are frozen and cannot finish: resume, or pause with abort",
                code="FAILED_PRECONDITION",
            )

    async def _drain(self) -> None:
        total = self._in_flight
        quiet = 0
        while quiet < 2:  # one look may be older than the request that it does not show
            left = max((await self._engine.loads()).in_flight, len(self._streams.running))
            quiet = quiet + 1 if not left else 0
            total = max(total, left)
            self.order.report(Progress("draining", total - left, total, "requests"))
            await asyncio.sleep(_LOOK_S)

    async def commit(self) -> None:
        self._mine = self._streams.running
        self.sent = True
        hold = HOLDS[self._mode]
        if self._mode is PauseMode.ABORT:
            # Frozen in place they would end with their next step, for which the server would wait.
            await self._engine.put_back()
        if self._mode is PauseMode.KEEP and self._before.hold is not None:
            # What an earlier pause has put back stays there.
            hold = self._before.hold
        await self._engine.pause(hold, within_s=remaining_s(self.order.deadline_at))
        self._engine.believe(self._before.paused_as(self._mode, hold))

    async def undo(self) -> None:
        if self._before.hold is not None:
            await self._engine.pause(self._before.hold)
        else:
            await self._engine.resume()
        self._engine.believe(self._before)

    async def conclude(self) -> Conclusion:
        return await paused(self._mode, self._mine, self._in_flight)


class CarriedResume(Carried):
    def __init__(self, order: Order, engine: SglangEngine, streams: Streams) -> None:
        super().__init__(order)
        self._engine = engine
        self._streams = streams
        self._before = engine.belief
        self._in_flight = 0

    async def prepare(self) -> None:
        self._engine.belief.may_resume()
        await self._engine.same()
        self._in_flight = max((await self._engine.loads()).in_flight, len(self._streams.running))

    async def commit(self) -> None:
        self.sent = True
        await self._engine.resume()
        self._engine.believe(self._engine.belief.open)

    async def undo(self) -> None:
        if self._before.hold is not None:
            await self._engine.pause(self._before.hold)
        self._engine.believe(self._before)

    async def conclude(self) -> Conclusion:
        return Conclusion(requests_continued=self._in_flight)


class CarriedFlush(Carried):
    """An emptied cache costs time and nothing else, so there is nothing to undo, and it is waited
    for where that can be called off."""

    def __init__(
        self, order: Order, command: FlushCaches, engine: SglangEngine, streams: Streams
    ) -> None:
        super().__init__(order)
        self._kinds = command.caches
        self._engine = engine
        self._streams = streams

    async def prepare(self) -> None:
        """Busy is no answer: it is tried again, further and further apart."""
        engine, tries = self._engine, 0
        while not await engine.flush():
            frozen = engine.belief.paused is PauseMode.KEEP
            left_s = remaining_s(self.order.deadline_at) - _MARGIN_S
            if frozen or left_s <= 0:
                raise await self._in_use()
            await asyncio.sleep(min(_SPACING_S[min(tries, len(_SPACING_S) - 1)], left_s))
            tries += 1

    async def _in_use(self) -> RuntimeFault:
        known = ""
        with suppress(RuntimeFault):
            found = await self._engine.loads()
            running = sum(rank.running for rank in found.ranks)
            waiting = sum(rank.waiting for rank in found.ranks)
            known = f" ({running} run, {waiting} wait)"
        return RuntimeFault(
            "CACHE_IN_USE",
            f"the engine did not empty its cache: requests in flight use it{known}",
            retryable=True,
        )

    async def conclude(self) -> Conclusion:
        many = self._engine.found.data_parallel_size > 1
        return Conclusion(
            flushed=tuple(Flushed(kind, 0, 0) for kind in self._kinds),
            warnings=(FIRST_RANK_ALONE,) if many else (),
            proved=not many,
        )


def emptied() -> tuple[Flushed, ...]:
    return (Flushed(CacheKind.PREFIX, 0, 0),)
