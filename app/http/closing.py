"""The end of the process, as streams hear of it: before connections are asked to close."""

from __future__ import annotations

from collections.abc import Callable


class Closing:
    """Set once. Whoever sleeps in a stream is woken by what it gave to `tell`."""

    def __init__(self) -> None:
        self._begun = False
        self._told: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._begun

    def tell(self, wake: Callable[[], None]) -> None:
        self._told.append(wake)

    def set(self) -> None:
        self._begun = True
        for wake in self._told:
            wake()
