"""The row that is kept of one engine, in the hand of one who reads and writes it."""

from __future__ import annotations

from dataclasses import replace

from app.backends.kept_states import KeptStates
from app.backends.vllm.kept import Kept


class Overtaken(Exception):
    """Somebody else has written since it was read: what is known here is old."""


class Notes:
    def __init__(self, engine_id: str, states: KeptStates) -> None:
        self._engine_id = engine_id
        self._states = states

    async def read(self) -> Kept:
        """Raises ChadburnError: the place does not answer."""
        state = await self._states.get(self._engine_id)
        return Kept() if state is None else Kept.of(state)

    async def write(self, kept: Kept) -> Kept:
        """In the place of the version that `kept` was made from; what is then there. Raises
        Overtaken, ChadburnError."""
        state = kept.state()
        if not await self._states.put(self._engine_id, state):
            raise Overtaken
        return replace(kept, number=state.number)
