"""What tells which engines there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from app.operations.registering import EngineDraft

Listed = Mapping[str, EngineDraft]
"""By id."""


class Source(Protocol):
    name: str

    @property
    def listed(self) -> Listed | None:
        """As it last was whole. None: it never was since the start."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Why what it says now is not what is followed; empty: it is."""

    @property
    def remarks(self) -> Mapping[str, str]:
        """By name: what it lists that can't be an engine, and why. The others are followed."""

    async def follow(self, changed: Callable[[], None]) -> None:
        """For ever. `changed`: called when anything of the above has."""
