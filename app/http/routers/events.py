"""Events as they happen: of one operation, or of everything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from app.auth.principal import Principal
from app.auth.requires import About, Gate, Need
from app.domain.events import EventType
from app.domain.kinds import OperationKind
from app.domain.scopes import Scope
from app.http import streams
from app.http.bodies import Name
from app.http.cursors import Cursor, read_cursor
from app.http.documents.event import EventPage
from app.http.negotiation import chosen_type
from app.http.openings import Opening, open_all, open_operation, reset_all, reset_operation
from app.http.operation_lookup import KnownOperation
from app.http.outlook import Outlook
from app.http.paging import PageSize, clamp
from app.http.replies import problems, reply
from app.http.rooms import House, Rooms, rooms_of
from app.http.route import EdgeRoute, one_header
from app.http.routers.needs import MayRead
from app.ledger.values import EventFilter

_AS_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream of server-sent events; `id` is a cursor, `data` one JSON "
        "object. Or, by `Accept: application/json`, a page of them.",
        "content": {
            streams.MEDIA_TYPE: {
                "schema": {"type": "string"},
                "x-event-types": [*EventType, "snapshot", "reset", "goodbye"],
            }
        },
    },
    204: {"description": "The stream is over: the cursor is at the operation's last event"},
}

router = APIRouter(
    prefix="/v1",
    tags=["events"],
    route_class=EdgeRoute,
    responses={**_AS_STREAM, **problems(406)},
)


async def _cursor(
    request: Request,
    house: House,
    after: Annotated[
        str | None,
        Query(max_length=128, description="Go on behind this: an event's `id` or `position`"),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(alias="Last-Event-ID", description="As `after`, and before it")
    ] = None,
) -> Cursor | None:
    del last_event_id
    return read_cursor(house.ledger.identity, one_header(request, "last-event-id"), after)


From = Annotated[Cursor | None, Depends(_cursor)]
_NEEDED = Need((Scope.READ,))


@dataclass(frozen=True, slots=True)
class Reading:
    """Who reads which events. `begin`: where the caller wants to; `again`: from a snapshot, with
    the reason."""

    house: Rooms
    who: Principal
    request: Request
    outlook: Outlook
    begin: Callable[[], Awaitable[Opening]]
    again: Callable[[str], Awaitable[Opening]]
    until_terminal: bool


async def _wanted(
    engine: Annotated[list[Name], Query(max_length=100)] = [],  # noqa: B006 - FastAPI copies it
    kind: Annotated[list[OperationKind], Query()] = [],  # noqa: B006
    type: Annotated[list[EventType], Query()] = [],  # noqa: A002, B006
) -> EventFilter:
    return EventFilter(
        engine_ids=frozenset(engine) if engine else None,
        kinds=frozenset(kind),
        types=frozenset(type),
    )


@router.get("/operations/{operation}/events", response_model=EventPage, responses=problems(404))
async def watch_operation(
    who: MayRead,
    house: House,
    request: Request,
    operation: KnownOperation,
    cursor: From,
    page_size: PageSize = 50,
) -> Response:
    """From its first event, or from behind the cursor, to its terminal event."""
    wanted = EventFilter(operation_id=operation.id)
    outlook = await _outlook(request, who, wanted, frozenset({operation.engine_id}))

    async def begin() -> Opening:
        return await open_operation(house, operation, cursor)

    async def again(why: str) -> Opening:
        return await reset_operation(house, operation, why)

    reading = Reading(house, who, request, outlook, begin, again, until_terminal=True)
    return await _answer(reading, page_size)


@router.get("/events", response_model=EventPage)
async def watch_all(
    who: MayRead,
    house: House,
    request: Request,
    wanted: Annotated[EventFilter, Depends(_wanted)],
    cursor: From,
    page_size: PageSize = 50,
) -> Response:
    """A snapshot and what comes after it, or what comes behind the cursor. Does not end."""
    outlook = await _outlook(request, who, wanted, wanted.engine_ids)

    async def begin() -> Opening:
        return await open_all(house, outlook.wanted, cursor)

    async def again(why: str) -> Opening:
        return await reset_all(house, outlook.wanted, why)

    reading = Reading(house, who, request, outlook, begin, again, until_terminal=False)
    return await _answer(reading, page_size)


async def _outlook(
    request: Request, who: Principal, wanted: EventFilter, about: frozenset[str] | None
) -> Outlook:
    """Looked through once, so that what changes from here on is noticed."""
    gate = cast("Gate", request.state.gate)
    roster = rooms_of(request).roster
    outlook = Outlook(gate.policy, who, roster, wanted, Scope.READ, about=about)
    await outlook.look()
    return outlook


async def _still_may(request: Request) -> None:
    """Raises where token or policy are no longer good for it: for what it is about, if that is one
    engine."""
    permit = await _NEEDED.again(request)
    about: About | None = getattr(request.state, "about", None)
    if about is not None and not permit.unlimited:
        labels = await rooms_of(request).ledger.engines.labels(about.engine_id)
        permit.require_on(about.engine_id, labels.get(about.engine_id, {}), *_NEEDED.scopes)


async def _answer(reading: Reading, page_size: int) -> Response:
    house, request = reading.house, reading.request
    offered = (streams.MEDIA_TYPE, "application/json")
    if chosen_type(request.headers.getlist("accept"), offered) != streams.MEDIA_TYPE:
        page = await streams.event_page(
            house, reading.outlook.wanted, await reading.begin(), clamp(page_size), reading.again
        )
        return reply(page, headers=_next(request, page, page_size))
    streams.refuse_if_full(house, reading.who)

    async def again(why: str) -> Opening:
        async with house.tail.turn:
            return await reading.again(why)

    async with house.tail.turn:
        opening = await reading.begin()
    if opening.over and not opening.first:
        return Response(status_code=204)
    return streams.EventStream(
        house,
        reading.who,
        reading.outlook,
        opening,
        reopen=again,
        still_may=partial(_still_may, request),
        until_terminal=reading.until_terminal,
    )


def _next(request: Request, page: EventPage, page_size: int) -> dict[str, str]:
    if page.next_page_token is None:
        return {}
    query = request.query_params.multi_items()
    kept = [pair for pair in query if pair[0] not in ("after", "page_size")]
    path = request.scope["path"]
    target = urlencode([*kept, ("page_size", clamp(page_size)), ("after", page.next_page_token)])
    return {"Link": f'<{quote(path)}?{target}>; rel="next"'}
