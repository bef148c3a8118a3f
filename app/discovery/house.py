"""All sources of one gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from app.discovery.follower import Follower


class Finding:
    def __init__(self, followers: Iterable[Follower]) -> None:
        self._followers = tuple(followers)

    @property
    def ok(self) -> bool:
        """What each of them says now is what is followed."""
        return all(one.ok for one in self._followers)

    async def run(self) -> None:
        """For ever."""
        await self._each(Follower.run)

    async def stop(self) -> None:
        """After `run` has been cancelled."""
        await self._each(Follower.stop)

    async def _each(self, does: Callable[[Follower], Awaitable[None]]) -> None:
        await asyncio.gather(*map(does, self._followers))
