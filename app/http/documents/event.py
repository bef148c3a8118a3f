"""One event of an operation, and pages of them."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field, JsonValue

from app.ledger.values import StoredEvent

Fields = dict[str, JsonValue]


class EventDocument(BaseModel):
    position: int
    operation: str
    engine: str
    sequence: int
    engine_sequence: int | None
    type: str
    time: datetime
    data: Fields

    @classmethod
    def of(cls, stored: StoredEvent) -> EventDocument:
        event = stored.event
        return cls(
            position=stored.position,
            operation=event.operation_id,
            engine=event.engine_id,
            sequence=event.sequence,
            engine_sequence=event.engine_sequence,
            type=event.type,
            time=event.time,
            data=dict(event.data),
        )


class ControlDocument(BaseModel):
    """`snapshot` or `reset`, which the stream itself says; see `data`."""

    type: str
    data: Fields


class EventPage(BaseModel):
    items: list[EventDocument | ControlDocument]
    cursor: str = Field(description="Go on from here with ?after=, also when there is no more now")
    next_page_token: str | None = Field(description="The same, when more is there already")
