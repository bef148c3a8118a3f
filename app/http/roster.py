"""The labels of all engines, for those who look at them often."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from app.domain.selectors import Labels
from app.ledger.ledger import Ledger


class Roster:
    """Read from the ledger no more than once in `good_for_s` (seconds), however many ask; and at
    once for an engine that is not known yet."""

    def __init__(self, ledger: Ledger, *, good_for_s: float = 1.0) -> None:
        self._ledger = ledger
        self._good_for_s = good_for_s
        self._labels: Mapping[str, Labels] = {}
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    async def labels(self, needed: Collection[str] = ()) -> Mapping[str, Labels]:
        """By engine, removed ones too. The same object as before where nothing has changed."""
        if self._is_young() and self._knows(needed):
            return self._labels
        async with self._reading:
            if not (self._is_young() and self._knows(needed)):
                # Counted from before it was asked for: nothing is taken for newer than it is.
                read_at = asyncio.get_running_loop().time()
                found = await self._ledger.engines.labels()
                if found != self._labels:
                    self._labels = found
                self._read_at = read_at
        return self._labels

    def _is_young(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self._read_at is not None and now - self._read_at < self._good_for_s

    def _knows(self, needed: Collection[str]) -> bool:
        return all(engine_id in self._labels for engine_id in needed)
