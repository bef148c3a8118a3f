"""Who has an engine's one slot, and who waits for it in which order."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.errors import EngineBusy, QueueFull

_WAITED_FOR = "other orders wait for this engine"


@dataclass(frozen=True, slots=True)
class Queueing:
    """An order that waits where the engine is busy. `limit`: so many may wait.

    `in_any_case`: also where the engine has become free. It was judged as one that waits, by less
    than what an order has to satisfy that is sent now, and is judged by all of it at its turn.
    """

    limit: int
    in_any_case: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """The exclusive operations of one engine that have not ended. `holder`: the one in the slot.
    `waiting`: those that are queued, in the order in which they were taken on."""

    holder: str | None = None
    waiting: tuple[str, ...] = ()

    @property
    def first(self) -> str | None:
        """What is in the way of a new order. None: nothing is."""
        return self.holder or (self.waiting[0] if self.waiting else None)

    @property
    def next(self) -> str | None:
        """Whose turn it is. None: the slot is held, or nobody waits."""
        return None if self.holder is not None else self.first

    def enter(self, queueing: Queueing | None) -> int | None:
        """The place at which a new order is queued, 1 = next; None: it takes the slot.

        Those that wait were there before, also while the slot is free between two of them: an
        order that does not wait is refused then, and does not overtake them. Raises EngineBusy
        (only with `queueing` None), QueueFull.
        """
        first = self.first
        if queueing is None:
            if first is not None:
                raise self._busy(first)
            return None
        if first is None and not queueing.in_any_case:
            return None
        if len(self.waiting) >= queueing.limit:
            raise QueueFull(
                f"{len(self.waiting)} orders wait for this engine, and no more may",
                operation_id=first,
            )
        return len(self.waiting) + 1

    def check_turn(self, operation_id: str) -> None:
        """Of one that is queued: whether it may take the slot now. Raises EngineBusy."""
        if self.next != operation_id:
            raise self._busy(self.first)

    def _busy(self, first: str | None) -> EngineBusy:
        if self.holder is not None:
            return EngineBusy(operation_id=first)
        return EngineBusy(_WAITED_FOR, operation_id=first)
