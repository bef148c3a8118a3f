"""The order of all events, and reading it without ever missing one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from app.ledger.values import EventFilter, StoredEvent


class Subscription(Protocol):
    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next commit of events, at most so long.

        Returns at once when one was committed since the subscription began, or since the last
        call. True: there may be something new. False: the time is up. Holds no database
        connection while it waits.
        """


class Events:
    """Positions rise in an order that agrees with each operation's sequence, and nothing ever
    becomes visible behind a position that was delivered. They have gaps."""

    async def of_operation(
        self, operation_id: str, after_sequence: int = 0, limit: int = 500
    ) -> tuple[StoredEvent, ...]:
        """In order of sequence. An unknown operation has none."""
        raise NotImplementedError

    async def after(
        self, position: int, wanted: EventFilter, limit: int = 500
    ) -> tuple[tuple[StoredEvent, ...], int]:
        """The matching events behind `position`, in order, and the horizon: the position up to
        which everything that matches has been given. Go on from the horizon, not from the last
        event."""
        raise NotImplementedError

    async def horizon(self) -> int:
        """The position up to which everything is settled; what comes later lies behind it."""
        raise NotImplementedError

    async def oldest(self) -> int:
        """The oldest cursor that can still be resumed: events up to and including this position
        may have been pruned. `after(p)` misses nothing if and only if p >= oldest()."""
        raise NotImplementedError

    def subscribe(self) -> AbstractContextManager[Subscription]:
        """Subscribe first, then read what is there, then wait: nothing falls between."""
        raise NotImplementedError
