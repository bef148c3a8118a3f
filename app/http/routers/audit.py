"""The audit: who asked for what, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from app.auth.requires import permit_of
from app.domain.scopes import Scope
from app.http import csv_export
from app.http.documents.audit import AuditDocument, AuditPage
from app.http.moments import Since
from app.http.negotiation import chosen_type
from app.http.paging import PageSize, PageToken, clamp, next_link, number_of, token_of
from app.http.records import record_read
from app.http.replies import problems, reply
from app.http.rooms import House
from app.http.route import EdgeRoute
from app.http.routers.needs import MayAudit
from app.ledger.values import AuditFilter

router = APIRouter(prefix="/v1", tags=["audit"], route_class=EdgeRoute, responses=problems())

_COLUMNS = (
    *("id", "at", "action", "outcome", "principal.issuer", "principal.subject"),
    *("principal.client_id", "engine", "operation", "reason", "note", "source"),
    *("request_id", "trace_id", "detail", "scopes"),
)

PlainText = Annotated[str | None, Query(max_length=255, pattern=r"^[^\x00-\x1f]*$")]


@dataclass(frozen=True, slots=True)
class Listing:
    query: dict[str, Any]
    wanted: AuditFilter


async def _listing(
    request: Request,
    engine: PlainText = None,
    operation: PlainText = None,
    principal: PlainText = None,
    action: PlainText = None,
    since: Annotated[Since | None, Query(description="Then or later")] = None,
) -> Listing:
    query = {
        "engine": engine,
        "operation": operation,
        "principal": principal,
        "action": action,
        "since": None if since is None else since.isoformat(),
    }
    wanted = AuditFilter(
        engine_id=engine,
        operation_id=operation,
        subject=principal,
        action=action,
        since=since,
        sight=permit_of(request).sight(Scope.AUDIT),
    )
    return Listing(query, wanted)


@router.get(
    "/audit",
    response_model=AuditPage,
    responses={200: {"content": {csv_export.MEDIA_TYPE: {}}}, **problems(406)},
)
async def read_audit(
    who: MayAudit,
    house: House,
    request: Request,
    listing: Annotated[Listing, Depends(_listing)],
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Response:
    """Newest first; reading it is written down too. `Accept: text/csv` gives a table."""
    before = number_of(page_token, listing.query)
    form = chosen_type(
        request.headers.getlist("accept"), ("application/json", csv_export.MEDIA_TYPE)
    )
    asked = {name: value for name, value in listing.query.items() if value is not None}
    await record_read(request, who, {"format": form, **asked})
    if form == csv_export.MEDIA_TYPE:
        return csv_export.csv_reply(
            "audit",
            _COLUMNS,
            lambda at, size: house.ledger.audit.page(listing.wanted, at, size),
            AuditDocument.of,
        )
    page = await house.ledger.audit.page(listing.wanted, before, clamp(page_size))
    token = None if page.next is None else token_of(page.next, listing.query)
    query = {**listing.query, "page_size": clamp(page_size)}
    return reply(
        AuditPage(items=[AuditDocument.of(a) for a in page.items], next_page_token=token),
        headers=next_link("/v1/audit", query, token) if token else None,
    )
