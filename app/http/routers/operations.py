"""Operations: what was ordered, and how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from app.auth.requires import Need, permit_of
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Operation
from app.domain.scopes import Scope
from app.http import csv_export
from app.http.bodies import CancelBody, SettleBody
from app.http.calls import PreferHeader, awaited
from app.http.documents.operation import OperationDocument, OperationPage
from app.http.moments import Since
from app.http.negotiation import chosen_type, preference_of
from app.http.operation_lookup import KnownOperation
from app.http.paging import PageSize, PageToken, clamp, next_link, number_of, token_of
from app.http.records import caller_of
from app.http.replies import operation_reply, problems, reply
from app.http.rooms import House
from app.http.route import EdgeRoute
from app.http.routers.needs import MayCancel, MayRead, MaySettle
from app.ledger.values import OperationFilter

router = APIRouter(
    prefix="/v1/operations", tags=["operations"], route_class=EdgeRoute, responses=problems()
)

_COLUMNS = (
    *("id", "engine", "kind", "state", "created_at", "started_at", "ended_at"),
    *("principal.issuer", "principal.subject", "principal.client_id", "reason"),
    *("verification", "error.code", "error.reason", "error.message", "revision"),
    *("request", "result", "trace_id", "idempotency_key"),
)

PlainText = Annotated[str | None, Query(max_length=255, pattern=r"^[^\x00-\x1f]*$")]

# As the header takes it, but without the quotes that it may have there.
Key = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]{1,128}$")]


@dataclass(frozen=True, slots=True)
class Listing:
    query: dict[str, Any]
    wanted: OperationFilter


async def _listing(
    request: Request,
    engine: PlainText = None,
    kind: Annotated[list[OperationKind], Query()] = [],  # noqa: B006 - FastAPI copies it
    state: Annotated[list[OperationState], Query()] = [],  # noqa: B006
    principal: PlainText = None,
    idempotency_key: Annotated[
        Key | None, Query(description="The whole key of the call that ordered it, whoever's")
    ] = None,
    since: Annotated[Since | None, Query(description="Created then or later")] = None,
) -> Listing:
    query = {
        "engine": engine,
        "kind": sorted(kind),
        "state": sorted(state),
        "principal": principal,
        "idempotency_key": idempotency_key,
        "since": None if since is None else since.isoformat(),
    }
    wanted = OperationFilter(
        engine_id=engine,
        kinds=frozenset(kind),
        states=frozenset(state),
        subject=principal,
        key=idempotency_key,
        since=since,
        sight=permit_of(request).sight(Scope.READ),
    )
    return Listing(query, wanted)


@router.get(
    "",
    response_model=OperationPage,
    responses={200: {"content": {csv_export.MEDIA_TYPE: {}}}, **problems(406)},
)
async def list_operations(
    who: MayRead,
    house: House,
    request: Request,
    listing: Annotated[Listing, Depends(_listing)],
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Response:
    """Newest first. `Accept: text/csv` gives all of them as a table."""
    before = number_of(page_token, listing.query)
    form = chosen_type(
        request.headers.getlist("accept"), ("application/json", csv_export.MEDIA_TYPE)
    )
    if form == csv_export.MEDIA_TYPE:
        return csv_export.csv_reply(
            "operations",
            _COLUMNS,
            lambda at, size: house.ledger.operations.page(listing.wanted, at, size),
            OperationDocument.of,
        )
    page = await house.ledger.operations.page(listing.wanted, before, clamp(page_size))
    token = None if page.next is None else token_of(page.next, listing.query)
    query = {**listing.query, "page_size": clamp(page_size)}
    return reply(
        OperationPage(items=[OperationDocument.of(o) for o in page.items], next_page_token=token),
        headers=next_link("/v1/operations", query, token) if token else None,
    )


@router.get("/{operation}", response_model=OperationDocument, responses=problems(404))
async def get_operation(
    who: MayRead,
    house: House,
    request: Request,
    operation: KnownOperation,
    prefer: PreferHeader = None,
) -> Response:
    """How it stands; with `Prefer: wait=N` once it has ended, or after N seconds."""
    preference = house.waiting.honoured(preference_of(request.headers.getlist("prefer")))
    if preference.wait_s and not operation.done:
        operation = await awaited(request, operation, preference.wait_s)
    return operation_reply(operation, accepted=False, headers=preference.headers)


@router.post(
    "/{operation}/cancel",
    status_code=202,
    response_model=OperationDocument,
    responses={
        200: {"description": "It is cancelled", "model": OperationDocument},
        **problems(404, 409, 413, 415, 501, 502),
    },
)
async def cancel(
    who: MayCancel,
    house: House,
    request: Request,
    operation: KnownOperation,
    body: CancelBody | None = None,
) -> Response:
    """Ask for it to be cancelled. Takes the scope of its kind as well. Best effort: its end comes
    as any other end does."""
    await _need_of(Scope.CANCEL, operation).admit(request)
    note = None if body is None else body.reason
    cancelled = await house.orders.cancel(operation.id, caller_of(request, who, note))
    return operation_reply(cancelled, accepted=True)


@router.post(
    "/{operation}/settle",
    response_model=OperationDocument,
    responses=problems(404, 409, 413, 415),
)
async def settle(
    who: MaySettle, house: House, request: Request, operation: KnownOperation, body: SettleBody
) -> Response:
    """State the end of an operation that is `reconciling`. Takes the scope of its kind as well,
    and a person's token. It frees the engine's slot; nothing is asked of the engine."""
    await _need_of(Scope.SETTLE, operation).admit(request)
    caller = caller_of(request, who, body.reason)
    settled = await house.settlements.settle(operation.id, body.statement(), caller)
    return operation_reply(settled, accepted=False)


def _need_of(scope: Scope, operation: Operation) -> Need:
    return Need((scope, operation.kind.scope))
