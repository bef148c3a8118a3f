"""Events as they happen: of one operation, or of everything."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from app.auth.principal import Principal
from app.domain.events import EventType
from app.domain.kinds import OperationKind
from app.http import streams
from app.http.bodies import Name
from app.http.cursors import Cursor, read_cursor
from app.http.documents.event import EventPage
from app.http.negotiation import chosen_type
from app.http.openings import Opening, open_all, open_operation
from app.http.operation_lookup import KnownOperation
from app.http.paging import PageSize, clamp
from app.http.replies import problems, reply
from app.http.rooms import House, Rooms
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
    responses={**_AS_STREAM, **problems(406, 429)},
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
    opening = await open_operation(house, operation, cursor)
    wanted = EventFilter(operation_id=operation.id)
    return await _answer(house, who, request, wanted, opening, page_size, until_terminal=True)


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
    opening = await open_all(house, wanted, cursor)
    return await _answer(house, who, request, wanted, opening, page_size, until_terminal=False)


async def _answer(
    house: Rooms,
    who: Principal,
    request: Request,
    wanted: EventFilter,
    opening: Opening,
    page_size: int,
    *,
    until_terminal: bool,
) -> Response:
    offered = (streams.MEDIA_TYPE, "application/json")
    if chosen_type(request.headers.getlist("accept"), offered) != streams.MEDIA_TYPE:
        page = await streams.event_page(house, wanted, opening, clamp(page_size))
        return reply(page, headers=_next(request, page, page_size))
    if opening.over and not opening.first:
        return Response(status_code=204)
    return streams.EventStream(house, who, wanted, opening, until_terminal=until_terminal)


def _next(request: Request, page: EventPage, page_size: int) -> dict[str, str]:
    if page.next_page_token is None:
        return {}
    query = request.query_params.multi_items()
    kept = [pair for pair in query if pair[0] not in ("after", "page_size")]
    path = request.scope["path"]
    target = urlencode([*kept, ("page_size", clamp(page_size)), ("after", page.next_page_token)])
    return {"Link": f'<{quote(path)}?{target}>; rel="next"'}
