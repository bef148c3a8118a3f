"""The requests that an engine of one process is working on, and how orders reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from app.domain.kinds import AbortOutcome
from app.enginekit.runtime import AbortTally

_GONE_REMEMBERED = 4096


class RequestEnded(Exception):
    """The request was aborted; `message` is what its stream has to say."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RunningRequest:
    """One request. Its generation asks for its `turn` before each step."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self.why_ended: str | None = None
        self.over = asyncio.Event()

    async def turn(self) -> None:
        """Waits while requests are frozen. Raises RequestEnded."""
        while self._in_flight.frozen and self.why_ended is None:
            await self._in_flight.moved()
        if self.why_ended is not None:
            raise RequestEnded(self.why_ended)


class InFlight:
    """Used on one event loop. A request is known from the moment `running` is entered, which has to
    be before its generation waits for anything."""

    def __init__(self) -> None:
        self._requests: dict[str, RunningRequest] = {}
        self._gone: dict[str, None] = {}  # ids that were here lately, oldest first
        self._moved = asyncio.Event()
        self.frozen = False

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def running(self, request_id: str) -> Iterator[RunningRequest]:
        request = self._requests[request_id] = RunningRequest(self)
        try:
            yield request
        finally:
            del self._requests[request_id]
            self._gone[request_id] = None
            if len(self._gone) > _GONE_REMEMBERED:
                del self._gone[next(iter(self._gone))]
            request.over.set()

    def freeze(self, frozen: bool) -> None:
        self.frozen = frozen
        self._wake()

    async def moved(self) -> None:
        """Until something has been frozen, thawed or ended."""
        await self._moved.wait()

    async def end(self, request_ids: tuple[str, ...] | None, message: str) -> AbortTally:
        """Those, or all of them with None; frozen ones too. Returns when each is over."""
        wanted = tuple(self._requests) if request_ids is None else request_ids
        ending = {name: self._requests[name] for name in wanted if name in self._requests}
        for request in ending.values():
            request.why_ended = message
        self._wake()
        for request in ending.values():
            await request.over.wait()
        return AbortTally({name: self._outcome(name, name in ending) for name in wanted})

    def _outcome(self, name: str, ended: bool) -> AbortOutcome:
        if ended:
            return AbortOutcome.ABORTED
        return AbortOutcome.ALREADY_FINISHED if name in self._gone else AbortOutcome.NOT_FOUND

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
