"""Names of the events that a stream carries."""

from __future__ import annotations

from enum import StrEnum


class EventType(StrEnum):
    ACCEPTED = "accepted"
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    PROGRESS = "progress"
    RANK = "rank"
    WARNING = "warning"
    RECONCILING = "reconciling"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SETTLED = "settled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL_EVENTS


TERMINAL_EVENTS = frozenset(
    {EventType.COMPLETED, EventType.FAILED, EventType.CANCELLED, EventType.SETTLED}
)


class ControlEvent(StrEnum):
    """Said by the stream itself; they have no place in the ledger."""

    SNAPSHOT = "snapshot"
    RESET = "reset"
    GOODBYE = "goodbye"
