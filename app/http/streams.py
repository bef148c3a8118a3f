"""Event streams (the WHATWG's server-sent events), and the same events as JSON pages.

A stream reads the ledger by position, so it cannot miss an event that commits while it looks
elsewhere, and holds nothing of the database between two reads. It ends at the terminal event of
its operation, at the caller's token's end, when token or policy are no longer good for it, at its
own longest life, and when the process closes; all but the first say goodbye, and the reader comes
back with Last-Event-ID. Where events it has not told yet are pruned, or other engines have come
into the caller's sight, it says `reset` and begins anew.

A reader that does not take what it is sent is cut off after `stream_send_timeout_s`. It loses
nothing either: its last id is where it goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import anyio
from sse_starlette.event import JSONServerSentEvent, ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from app.auth.principal import Principal
from app.domain.errors import ChadburnError, Unavailable
from app.domain.events import TERMINAL_EVENTS, ControlEvent
from app.http.cursors import cursor_text
from app.http.documents.event import ControlDocument, EventDocument, EventPage
from app.http.openings import Opening, Said
from app.http.outlook import Outlook
from app.http.refusals import Closing as ClosingRefusal
from app.http.rooms import Rooms
from app.ledger.errors import HistoryPruned
from app.ledger.values import EventFilter, StoredEvent
from app.observability.log import logger

MEDIA_TYPE = "text/event-stream"
_RETRY_MS = 3000
_BATCH = 200
_PAUSE_S = 1.0
_SEP = "\n"

_log = logger("chadburn.streams")


def refuse_if_full(rooms: Rooms, who: Principal) -> None:
    """Before anything is read for a stream. Raises TooManyStreams and Closing."""
    if rooms.closing.is_set():
        raise ClosingRefusal
    rooms.streams.refuse_if_full(who)


class EventStream(EventSourceResponse):
    """One open stream. Counted from before its first byte until it is over, however it ends."""

    def __init__(
        self,
        rooms: Rooms,
        who: Principal,
        outlook: Outlook,
        opening: Opening,
        *,
        reopen: Callable[[str], Awaitable[Opening]],
        still_may: Callable[[], Awaitable[object]],
        until_terminal: bool,
    ) -> None:
        """`reopen`: from a snapshot, and why. `still_may`: raises where the caller's token, or the
        policy, is no longer good for this."""
        self._rooms = rooms
        self._who = who
        self._outlook = outlook
        self._opening = opening
        self._reopen = reopen
        self._still_may = still_may
        self._until_terminal = until_terminal
        now = rooms.clock.now()
        self._opened_at = self._asked_at = now
        self._sight_changed = False
        longest = now + timedelta(seconds=rooms.edge.stream_max_s)
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
        """Raises TooManyStreams while nothing has been sent, so that it is a real refusal: of
        many that come at once, only here is it certain which is the last to get in."""
        with self._rooms.streams.one_more(self._who):
            self._rooms.metrics.stream_opened()
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                _log.info("stream_cut_off", why="reader_too_slow")
            finally:
                self._rooms.metrics.stream_closed()

    async def _messages(self) -> AsyncIterator[ServerSentEvent | bytes]:
        yield ServerSentEvent(comment="chadburn", retry=_RETRY_MS, sep=_SEP)
        opening: Opening | None = self._opening
        while opening is not None:
            for said in opening.first:
                yield self._said(said)
            position, due, begun_from = opening.position, opening.sequence, opening
            opening = None
            while not begun_from.over:
                why: str | None = None
                try:
                    wanted = self._outlook.wanted
                    events, horizon = await self._rooms.tail.after(position, wanted, _BATCH)
                    if await self._outlook.look({stored.event.engine_id for stored in events}):
                        self._sight_changed = True
                        self._ask_now()
                    if self._sight_changed:
                        why = await self._why_over()
                        if why is None:
                            # Only then is it done: the database may be away for the moment.
                            opening = await self._reopen("sight_changed")
                            self._sight_changed = False
                            break
                        events = ()
                    fresh = [
                        stored
                        for stored in events
                        if self._outlook.sees(stored) and _is_new(stored, begun_from)
                    ]
                    if self._until_terminal:
                        due = _due_after(fresh, due)
                except HistoryPruned:
                    opening = await self._reopen("history_pruned")
                    break
                except Unavailable:
                    # The database will be back, and with it what happened meanwhile. Sent away,
                    # all readers would come back at once.
                    await anyio.sleep(_PAUSE_S)
                    fresh, events, horizon = [], (), position
                for stored in fresh:
                    yield self._rooms.tail.spelled(stored, self._event)
                    self._count(stored)
                    if self._until_terminal and stored.event.type in TERMINAL_EVENTS:
                        return
                position = max(position, horizon)
                why = why or await self._why_over()
                if why is not None:
                    yield self._said(Said(ControlEvent.GOODBYE, {"reason": why}))
                    return
                if not events:
                    left_s = (self._ends_at - self._rooms.clock.now()).total_seconds()
                    wait_s = min(max(left_s, 0.0), self._rooms.edge.stream_look_s)
                    await self._rooms.tail.moved_past(position, wait_s)

    def _count(self, stored: StoredEvent) -> None:
        """It is sent by now. What had happened before the stream was there is no lag of it."""
        if stored.event.time >= self._opened_at:
            late = self._rooms.clock.now() - stored.event.time
            self._rooms.metrics.event_sent(late.total_seconds())

    def _ask_now(self) -> None:
        self._asked_at -= timedelta(seconds=self._rooms.edge.stream_look_s)

    async def _why_over(self) -> str | None:
        now = self._rooms.clock.now()
        if self._rooms.closing.is_set():
            return "shutting_down"
        if now >= self._ends_at:
            return "token_expired" if self._token_ends else "lifetime_over"
        if (now - self._asked_at).total_seconds() >= self._rooms.edge.stream_look_s:
            self._asked_at = now
            try:
                await self._still_may()
            except Unavailable:
                return None  # whether it is good can't be said at present; it was
            except ChadburnError as error:
                _log.info("stream_ended", why=error.reason)
                return "permission_lost"
        return None

    def _event(self, stored: StoredEvent) -> bytes:
        said = JSONServerSentEvent(
            EventDocument.of(stored).model_dump(mode="json"),
            event=str(stored.event.type),
            id=cursor_text(self._rooms.ledger.identity, stored.position),
            sep=_SEP,
        )
        return said.encode()

    def _said(self, said: Said) -> ServerSentEvent:
        at = said.position
        return JSONServerSentEvent(
            said.data,
            event=said.type.value,
            id=None if at is None else cursor_text(self._rooms.ledger.identity, at),
            sep=_SEP,
        )


async def event_page(
    rooms: Rooms,
    wanted: EventFilter,
    opening: Opening,
    size: int,
    reopen: Callable[[str], Awaitable[Opening]],
) -> EventPage:
    """The same events in the same order, as many as are there now: read from the ledger, so that
    who has seen an operation ended finds its end here."""
    try:
        events, horizon = await rooms.ledger.events.after(opening.position, wanted, size)
    except HistoryPruned:
        opening = await reopen("history_pruned")
        events, horizon = (), opening.position
    items: list[EventDocument | ControlDocument] = [_control(said) for said in opening.first]
    items += [EventDocument.of(stored) for stored in events if _is_new(stored, opening)]
    full = len(events) == size
    position = events[-1].position if full else max(horizon, opening.position)
    cursor = cursor_text(rooms.ledger.identity, position)
    return EventPage(items=items, cursor=cursor, next_page_token=cursor if full else None)


def _control(said: Said) -> ControlDocument:
    data: dict[str, Any] = said.data
    return ControlDocument(type=said.type.value, data=data)


def _due_after(events: Sequence[StoredEvent], due: int | None) -> int | None:
    """The number of the event behind these. Raises HistoryPruned where one of them is missing."""
    for stored in events:
        if due is not None and stored.event.sequence != due:
            raise HistoryPruned("these events are no longer kept")
        due = stored.event.sequence + 1
    return due


def _is_new(stored: StoredEvent, opening: Opening) -> bool:
    """Not yet part of the snapshot that was said first."""
    known = (opening.sequences or {}).get(stored.event.operation_id, 0)
    return stored.event.sequence > known
