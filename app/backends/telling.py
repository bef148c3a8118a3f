"""Saying what is not well once, and not with each of many tries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

REMIND_S = 600.0
FLAPS_S = 60.0


class Trouble:
    """Of one thing that is tried again and again. What is the same as before is said again after
    ten minutes, with how often it was seen meanwhile; that it is over is said once. What comes and
    goes is said once a minute at most."""

    def __init__(
        self,
        log: logging.Logger,
        about: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`about`: the beginning of each line."""
        self._log = log
        self._about = about
        self._monotonic = monotonic
        self._kind: str | None = None
        self._due = 0.0
        self._times = 0
        self._open = False

    def seen(self, level: int, said: str, kind: str | None = None) -> None:
        """`kind`: what makes it the same as before; None: its words."""
        kind, now = kind or said, self._monotonic()
        self._times += 1
        if kind == self._kind and now < self._due:
            return
        more = f" ({self._times} times since)" if kind == self._kind and self._open else ""
        self._log.log(level, "%s: %s%s", self._about, said, more)
        self._kind, self._due, self._times, self._open = kind, now + REMIND_S, 0, True

    def over(self) -> None:
        if self._open:
            self._log.info("%s: well again", self._about)
            self._due, self._times, self._open = self._monotonic() + FLAPS_S, 0, False
