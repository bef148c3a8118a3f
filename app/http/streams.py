"""Event streams (the WHATWG's server-sent events), and the same events as JSON pages.

A stream reads the ledger by position, so it cannot miss an event that commits while it looks
elsewhere, and holds nothing of the database between two reads. It ends at the terminal event of
its operation, at the caller's token's end, at its own longest life, and when the process closes;
all but the first say goodbye, and the reader comes back with Last-Event-ID.

A reader that does not take what it is sent is cut off after `stream_send_timeout_s`. It loses
nothing either: its last id is where it goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any, cast

import anyio
from sse_starlette.event import JSONServerSentEvent, ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from app.auth.principal import Principal
from app.domain.events import TERMINAL_EVENTS, ControlEvent
from app.http.cursors import cursor_text
from app.http.documents.event import ControlDocument, EventDocument, EventPage
from app.http.openings import Opening, Said
from app.http.refusals import Closing as ClosingRefusal
from app.http.refusals import TooManyStreams
from app.http.rooms import Rooms
from app.ledger.values import EventFilter, StoredEvent
from app.observability.log import logger

MEDIA_TYPE = "text/event-stream"
_RETRY_MS = 3000
_BATCH = 200
_LOOK_S = 15.0  # how long at most before the clock is read again
_SEP = "\n"

_log = logger("chadburn.streams")


class EventStream(EventSourceResponse):
    """One open stream. Counted from its first byte until it is over, however it ends."""

    def __init__(
        self,
        rooms: Rooms,
        who: Principal,
        wanted: EventFilter,
        opening: Opening,
        *,
        until_terminal: bool,
    ) -> None:
        """Raises TooManyStreams and Closing, while a refusal can still be a real one."""
        if rooms.closing.is_set():
            raise ClosingRefusal
        if rooms.streams.count >= rooms.edge.max_streams:
            raise TooManyStreams
        self._rooms = rooms
        self._wanted = wanted
        self._opening = opening
        self._until_terminal = until_terminal
        longest = rooms.clock.now() + timedelta(seconds=rooms.edge.stream_max_s)
        self._token_ends = who.expires_at <= longest
        self._ends_at: datetime = min(who.expires_at, longest)
        super().__init__(
            self._messages(),
            ping=rooms.edge.ping_s,
            sep=_SEP,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep=_SEP),
            send_timeout=rooms.edge.stream_send_timeout_s,
            # Whichever hears of the end first, the library's watcher or our server, tells all.
            shutdown_event=cast("anyio.Event", rooms.closing),
            shutdown_grace_period=rooms.edge.stream_grace_s,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._rooms.streams.count += 1
        self._rooms.metrics.stream_opened()
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _log.info("stream_cut_off", why="reader_too_slow")
        finally:
            self._rooms.streams.count -= 1
            self._rooms.metrics.stream_closed()

    async def _messages(self) -> AsyncIterator[ServerSentEvent]:
        yield ServerSentEvent(comment="chadburn", retry=_RETRY_MS, sep=_SEP)
        for said in self._opening.first:
            yield self._said(said)
        position = self._opening.position
        while not self._opening.over:
            events, horizon = await self._rooms.tail.after(position, self._wanted, _BATCH)
            for stored in events:
                if _is_new(stored, self._opening):
                    yield self._event(stored)
                if self._until_terminal and stored.event.type in TERMINAL_EVENTS:
                    return
            position = max(position, horizon)
            why = self._why_over()
            if why is not None:
                yield self._said(Said(ControlEvent.GOODBYE, {"reason": why}))
                return
            if not events:
                left_s = (self._ends_at - self._rooms.clock.now()).total_seconds()
                await self._rooms.tail.moved_past(position, min(max(left_s, 0.0), _LOOK_S))

    def _why_over(self) -> str | None:
        if self._rooms.closing.is_set():
            return "shutting_down"
        if self._rooms.clock.now() >= self._ends_at:
            return "token_expired" if self._token_ends else "lifetime_over"
        return None

    def _event(self, stored: StoredEvent) -> ServerSentEvent:
        return JSONServerSentEvent(
            EventDocument.of(stored).model_dump(mode="json"),
            event=str(stored.event.type),
            id=cursor_text(self._rooms.ledger.identity, stored.position),
            sep=_SEP,
        )

    def _said(self, said: Said) -> ServerSentEvent:
        at = said.position
        return JSONServerSentEvent(
            said.data,
            event=said.type.value,
            id=None if at is None else cursor_text(self._rooms.ledger.identity, at),
            sep=_SEP,
        )


async def event_page(rooms: Rooms, wanted: EventFilter, opening: Opening, size: int) -> EventPage:
    """The same events in the same order, as many as are there now: read from the ledger, so that
    who has seen an operation ended finds its end here."""
    events, horizon = await rooms.ledger.events.after(opening.position, wanted, size)
    items: list[EventDocument | ControlDocument] = [_control(said) for said in opening.first]
    items += [EventDocument.of(stored) for stored in events if _is_new(stored, opening)]
    full = len(events) == size
    position = events[-1].position if full else max(horizon, opening.position)
    cursor = cursor_text(rooms.ledger.identity, position)
    return EventPage(items=items, cursor=cursor, next_page_token=cursor if full else None)


def _control(said: Said) -> ControlDocument:
    data: dict[str, Any] = said.data
    return ControlDocument(type=said.type.value, data=data)


def _is_new(stored: StoredEvent, opening: Opening) -> bool:
    """Not yet part of the snapshot that was said first."""
    known = (opening.sequences or {}).get(stored.event.operation_id, 0)
    return stored.event.sequence > known
