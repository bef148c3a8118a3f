"""What is believed of an engine that tells little of itself, held together with its notes."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from app.enginekit.runtime import RuntimeFault
from app.sidecars.notes import Notes


class Believable(Protocol):
    def document(self, identity: Any) -> dict[str, Any]:
        """For the notes, of that life of the engine."""


B = TypeVar("B", bound=Believable)


class Believing(Generic[B]):
    """`belief` is written down before it is used."""

    def __init__(self, notes: Notes, identity: Any, belief: B) -> None:
        self.belief = belief
        self._notes = notes
        self._identity = identity
        self._numbers: dict[str, int] = {}

    def believe(self, belief: B) -> None:
        """Raises RuntimeFault: it cannot be written down, so it must not come to be so."""
        if belief == self.belief:
            return
        try:
            self._notes.write(belief.document(self._identity))
        except OSError as error:
            text = "what is known of the engine cannot be written down"
            raise RuntimeFault("NOTES_UNWRITABLE", text, retryable=True) from error
        self.belief = belief

    def number_of(self, adapter: str) -> int:
        """An engine has ids of its own for its adapters, and tells them to nobody."""
        return self._numbers.setdefault(adapter, len(self._numbers) + 1)
