"""How many callers may wait for answers of engines: of one, and of all together.

An engine that is slow or gone answers after seconds. Whoever asks it holds a request's place until
then, and without a bound those of one dead engine would be all there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from app.domain.errors import TooManyEngineReads


class RoundTrips:
    def __init__(self, *, most: int = 64, most_of_engine: int = 16) -> None:
        self._most = most
        self._most_of_engine = most_of_engine
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def one_more(self, engine_id: str) -> Iterator[None]:
        """For the time of the block. Raises TooManyEngineReads."""
        if self._under_way[engine_id] >= self._most_of_engine:
            raise TooManyEngineReads("as many callers wait for this engine as may")
        if self._under_way.total() >= self._most:
            raise TooManyEngineReads("as many callers wait for engines as may")
        self._under_way[engine_id] += 1
        try:
            yield
        finally:
            self._under_way[engine_id] -= 1
            if not self._under_way[engine_id]:
                del self._under_way[engine_id]
