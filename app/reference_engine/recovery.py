"""Brings an engine's ranks back after a loss: at once the first time, then ever more slowly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from app.reference_engine.engine import Engine
from app.reference_engine.errors import ReferenceEngineError
from app.reference_engine.messages import Gate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds. A start that fails, and a loss of ranks that lived less than ``calm_s``, make the
    next start wait: not at all, then ``first_s``, then twice as long each time, ``longest_s`` at
    most."""

    first_s: float = 1.0
    longest_s: float = 60.0
    calm_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.longest_s or self.calm_s < 0:
            raise ValueError("a pace has 0 < first_s <= longest_s, and calm_s of at least 0")


class Pacing:
    """How long to wait before each start. Pure: no clock."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._next_s = 0.0

    def wait_s(self, lived_s: float) -> float:
        """Before the next start, when the ranks lived that long; 0 when they did not even start."""
        if lived_s >= self._pace.calm_s:
            self._next_s = 0.0
        wait_s = self._next_s
        self._next_s = min(self._pace.longest_s, max(self._pace.first_s, 2 * wait_s))
        return wait_s


class Recovery:
    """It never gives up: what is in the way of a start, a file or a device, may be mended. Every
    start takes the place of a group that was ended before, so there are never more ranks than the
    engine's own."""

    def __init__(
        self,
        engine: Engine,
        gate: Callable[[], Gate],
        pace: Pace | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``gate``: what the ranks' gate has to be, asked when they are there. ``now`` in seconds
        on any steady clock."""
        self._engine = engine
        self._gate = gate
        self._pacing = Pacing(pace or Pace())
        self._now = now
        self._sleep = sleep

    async def run(self) -> None:
        """Until the engine is closed: wait for a loss, and start the ranks again until they are
        there."""
        born = self._now()
        while not self._engine.closed:
            await self._engine.until_lost()
            wait_s = self._pacing.wait_s(self._now() - born)
            causes = self._engine.lost
            for rank in self._engine.blamed:
                log.error(
                    "rank %d was lost: %s; all ranks start again in %g s",
                    *(rank, causes.get(rank, "unknown"), wait_s),
                )
            await self._sleep(wait_s)
            born = self._now()
            try:
                await self._engine.restart(self._gate)
            except (ReferenceEngineError, OSError) as error:
                log.error("the ranks could not be started again: %s", error)
                continue
            born = self._now()
            state = "without weights" if self._engine.holdings.weights_missing else "whole"
            log.warning("the ranks are back, %s", state)
