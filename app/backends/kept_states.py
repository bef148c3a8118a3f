"""Where is kept what an engine does not keep of itself, one row for each engine."""

from __future__ import annotations

from typing import Protocol

from app.domain.kept_state import KeptState


class KeptStates(Protocol):
    """Both may raise a ChadburnError: the place does not answer."""

    async def get(self, engine_id: str) -> KeptState | None:
        """None: nothing was ever kept."""

    async def put(self, engine_id: str, state: KeptState) -> bool:
        """Whether it was written, in the place of the version whose number is one lower."""
