"""Looking at an engine without standing in its way.

What a server answers by itself is read each time. What it has to ask the engine is read seldom: it
costs the engine time, and a call that is under way while the engine ends may never be answered.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from app.domain.kinds import WeightsState
from app.domain.ranks import RankReport, RankState
from app.enginekit.runtime import Observation, RuntimeFault


@dataclass(frozen=True, slots=True)
class Orders:
    """How many have begun so far."""

    begun: int
    under_way: bool


NONE_YET = Orders(begun=0, under_way=False)


class Watch(ABC):
    """`restarted` is set when another process answers, or the engine behind it was started anew.
    `look_s`: how often the engine itself is asked. `busy`: with an order, for which it may have to
    stop answering."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._looked_at = float("-inf")
        self.busy = False
        self._doubted = False
        self._group = 0
        self.restarted = asyncio.Event()

    def doubt(self) -> None:
        """What does not touch weights, such as a pause, could not be undone for sure. So the engine
        is right again as soon as it can be read."""
        self._doubted = True

    def look_again(self) -> None:
        self._looked_at = float("-inf")

    async def observe(self, orders: Callable[[], Orders]) -> Observation:
        """An order that is under way says by itself what it changes."""
        self.busy = orders().under_way
        lost = await self.lost()
        if lost is None and not orders().under_way:
            await self.glance()
            now = asyncio.get_running_loop().time()
            if now >= self._looked_at + self._look_s and await self.look(orders):
                self._looked_at = now
                if self._doubted:
                    self._doubted = False
                    self._group += 1
        return self.seen(lost)

    @abstractmethod
    async def lost(self) -> str | None:
        """Why the engine cannot be had, one line; None: it can. Sets `restarted`."""

    async def glance(self) -> None:  # noqa: B027 - not every one does
        """What costs the engine nothing. Raises RuntimeFault."""

    @abstractmethod
    async def look(self, orders: Callable[[], Orders]) -> bool:
        """What is not read each time. False: an order has come meanwhile, so that what was read may
        be of before or of after. Raises RuntimeFault."""

    @abstractmethod
    def seen(self, lost: str | None) -> Observation:
        """What the kit is told; where it is `lost`, of what was known."""


def weights_if(lost: str | None, state: WeightsState) -> WeightsState:
    """Of an engine that can't be had, valid weights are known no more."""
    if lost is not None and state is WeightsState.VALID:
        return WeightsState.UNKNOWN
    return state


def ranks_if(lost: str | None, world_size: int) -> tuple[RankReport, ...]:
    """All of them have failed, or there is nothing to tell."""
    if lost is None:
        return ()
    return tuple(RankReport(rank, RankState.FAILED, lost) for rank in range(world_size))


async def first_look(watch: Watch) -> None:
    """Raises RuntimeFault when the engine cannot be observed at all."""
    seen = await watch.observe(lambda: NONE_YET)
    if seen.ranks:
        raise RuntimeFault("ENGINE_UNREACHABLE", seen.ranks[0].message, retryable=True)
