"""Progress as often as a runtime likes to report it, written at intervals."""

from __future__ import annotations

import asyncio

from app.domain.operation import Progress
from app.domain.transitions import Progressed
from app.enginekit.journal import Journal, LiveOperation
from app.enginekit.refusals import StoreUnavailable


class ProgressWriter:
    """Of one operation. Only the latest progress counts; what was said is not said twice."""

    def __init__(self, journal: Journal, live: LiveOperation, interval_s: float) -> None:
        self._journal = journal
        self._live = live
        self._interval_s = interval_s
        self._latest: Progress | None = None
        self._task: asyncio.Task[None] | None = None

    def note(self, progress: Progress) -> None:
        """From the event loop."""
        if progress == self._live.operation.progress:
            return
        self._latest = progress
        if self._task is None:
            self._task = asyncio.create_task(self._write())

    def drop(self) -> None:
        """Something more important follows; what is not yet written has no meaning after it."""
        self._latest = None

    def close(self) -> None:
        """The order is over."""
        self._latest = None
        if self._task is not None:
            self._task.cancel()

    async def _write(self) -> None:
        try:
            while (latest := self._latest) is not None:
                self._latest = None
                try:
                    await self._journal.record(self._live, lambda _: Progressed(progress=latest))
                except StoreUnavailable:
                    return  # the order itself finds out
                await asyncio.sleep(self._interval_s)
        finally:
            self._task = None
