"""What a rank's main thread is at, for the thread that answers the front end's pings.

A rank that hangs in a computation and a rank that waits for that one look alike from outside:
neither acknowledges anything. This tells them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pulse:
    """Written by the main thread, read by the other; each value is written in one piece."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: float | None = None
        self.waits = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step of the model."""
        self._began = self._now()
        try:
            yield
        finally:
            self._began = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever takes other ranks. ``waits`` stays set when a rank is missing."""
        self.waits = True
        yield
        self.waits = False

    def step_age_s(self) -> float | None:
        """Seconds since the step that is being computed began."""
        began = self._began
        return None if began is None else self._now() - began
