"""Pause, resume and flush."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from app.domain.commands import FlushCaches, Pause
from app.domain.kinds import CacheKind, PauseMode
from app.domain.operation import OperationWarning, Progress
from app.enginekit.runtime import Conclusion, Flushed, Order, RuntimeFault
from app.sidecars.dynamo.carried import WorkerOrder
from app.sidecars.dynamo.worker import DynamoWorker

_LOOK_S = 0.1
_TELL_S = 1.0
_LATE_S = 2.0
MAYBE_CACHED = OperationWarning(
    "CACHE_MAYBE_IN_USE",
    "requests have come meanwhile: the worker says that the cache is empty either way",
)


class _Admission(WorkerOrder):
    """An order that opens or closes the worker. One that is given up may take effect yet: it is
    waited for, a little, and what comes even later is put back when it does."""

    def __init__(self, order: Order, worker: DynamoWorker) -> None:
        super().__init__(order, worker)
        self._before = worker.belief.paused
        self._late = False

    async def _through(self, work: Coroutine[Any, Any, None]) -> None:
        async with self.sending():
            await self.worker.through(self._seen_to(work))

    async def _seen_to(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            if self._late:
                await self._put_back()

    async def _put_back(self) -> None:
        if self._before is not None:
            await self.worker.freeze()
        else:
            await self.worker.resume()

    async def undo(self) -> None:
        self._late = not await self.worker.is_over(_LATE_S)
        await self._put_back()
        self.worker.believe(replace(self.worker.belief, paused=self._before))


class CarriedPause(_Admission):
    """A drain is waited for while it can still be called off, which is in the preparation."""

    def __init__(self, order: Order, command: Pause, worker: DynamoWorker) -> None:
        super().__init__(order, worker)
        self._mode = command.mode
        self._in_flight = 0

    async def prepare(self) -> None:
        worker = self.worker
        worker.may_move()
        self._in_flight = (await worker.metrics()).in_flight or 0
        if self._mode is not PauseMode.DRAIN:
            return
        worker.belief.may_drain(self._in_flight)
        telling = asyncio.create_task(self._tell(self._in_flight))
        try:
            if PauseMode.DRAIN in worker.found.routes.modes:
                await self._close(PauseMode.DRAIN)
            else:
                await self._close_when_idle()
        finally:
            telling.cancel()
            await asyncio.wait({telling})

    async def commit(self) -> None:
        if self._mode is not PauseMode.DRAIN:
            await self._close(self._mode)
        self.worker.believe(replace(self.worker.belief, paused=self._mode))

    async def _close(self, mode: PauseMode) -> None:
        longest_s = self.worker.longest_s(self.order.deadline_at)
        await self._through(self.worker.pause(mode, within_s=longest_s))

    async def _close_when_idle(self) -> None:
        """A worker that has no drain goes on taking requests: it is frozen in a moment without any,
        and let go again where one has slipped in."""
        worker = self.worker
        while True:
            while (await worker.metrics()).in_flight:  # noqa: ASYNC110 - another process has them
                await asyncio.sleep(_LOOK_S)
            await self._close(PauseMode.KEEP)
            if not (await worker.metrics()).in_flight:
                return
            await worker.resume()

    async def _tell(self, total: int) -> None:
        """How far the drain is, for as long as it takes."""
        while True:
            await asyncio.sleep(_TELL_S)
            try:
                left = (await self.worker.metrics()).in_flight or 0
            except RuntimeFault:
                continue
            most = max(total, left)
            self.order.report(Progress("draining", most - left, most, "requests"))

    async def conclude(self) -> Conclusion:
        """By what was in flight when it began: a worker tells no more of it."""
        match self._mode:
            case PauseMode.ABORT:
                return Conclusion(requests_aborted=self._in_flight)
            case PauseMode.KEEP:
                return Conclusion(requests_kept=self._in_flight)
        return Conclusion()


class CarriedResume(_Admission):
    def __init__(self, order: Order, worker: DynamoWorker) -> None:
        super().__init__(order, worker)
        self._in_flight = 0

    async def prepare(self) -> None:
        self.worker.may_move()
        self.worker.belief.may_resume()
        self._in_flight = (await self.worker.metrics()).in_flight or 0

    async def commit(self) -> None:
        await self._through(self.worker.resume())
        self.worker.believe(replace(self.worker.belief, paused=None))

    async def _put_back(self) -> None:
        await self.worker.freeze()

    async def conclude(self) -> Conclusion:
        return Conclusion(requests_continued=self._in_flight)


class CarriedFlush(WorkerOrder):
    """An emptied cache costs time and nothing else, so there is nothing to undo. The worker says
    that it was emptied also where requests in flight kept it from being so: not asked then."""

    def __init__(self, order: Order, command: FlushCaches, worker: DynamoWorker) -> None:
        super().__init__(order, worker)
        self._kinds = command.caches
        self._crossed = False

    async def commit(self) -> None:
        if (await self.worker.metrics()).in_flight:
            raise RuntimeFault(
                "CACHE_IN_USE", "requests in flight use the cache: pause with abort", retryable=True
            )
        flush = self.worker.found.routes.flush
        assert flush is not None  # nothing else is offered
        await self.worker.order(flush, {})
        self._crossed = bool((await self.worker.metrics()).in_flight)

    async def conclude(self) -> Conclusion:
        flushed = tuple(Flushed(kind, 0, 0) for kind in self._kinds)
        return Conclusion(flushed=flushed, warnings=(MAYBE_CACHED,) if self._crossed else ())


FLUSHED = (Flushed(CacheKind.PREFIX, 0, 0),)
