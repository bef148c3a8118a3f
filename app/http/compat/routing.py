"""Routes of the layer. Where it is off for an engine, or the engine has nothing to put behind an
endpoint, there is no route: a call meets the same 404 as any path that nobody has thought of,
before anybody asks who calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

from fastapi import Depends
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from app.auth.requires import About, Need
from app.domain.engine import Engine
from app.domain.errors import UnknownEngine
from app.http.compat.asked import Asked
from app.http.compat.exposures import Flavour, Layer
from app.http.compat.giving import CompatCall
from app.http.compat.rows import Row, Table
from app.http.compat.sglang.table import SGLANG
from app.http.compat.vllm.table import VLLM
from app.http.rooms import rooms_of
from app.http.route import EdgeRoute, Handler

TABLES = {Layer.VLLM: VLLM, Layer.SGLANG: SGLANG}
_ID = re.compile(r"[a-z0-9-]{1,63}")


@dataclass(frozen=True, slots=True)
class _Open:
    """A route that is there, for one request."""

    engine: Engine
    flavour: Flavour


class CompatRoute(EdgeRoute):
    """One row of the table. An answer takes as long as the order does."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], *, layer: Layer, table: Table, row: Row
    ) -> None:
        self._layer = layer
        self._table = table
        self._row = row
        self._need = Need(row.scopes)
        super().__init__(
            path,
            endpoint,
            methods=list(row.methods),
            dependencies=[Depends(self._need)],
            include_in_schema=False,
            name=_name_of(layer, row),
        )

    def get_route_handler(self) -> Handler:
        async def handler(request: Request) -> Response:
            """Who calls may have been proved before (`state.principal`), by the listener or by
            what stood in the path. Everybody else shows a token."""
            found = cast("_Open", request.state.compat)
            try:
                with rooms_of(request).allowances.judging(request):
                    await self._need.admit(request)
                request.state.about = About(found.engine.id, found.engine.registration.labels)
                who = await self._need.admit(request)
            except UnknownEngine:  # there is none for this caller
                request.state.shape = None
                raise _no_route(request.scope) from None
            request.state.engine = found.engine
            call = CompatCall(
                request=request,
                engine=found.engine,
                who=who,
                layer=self._layer,
                flavour=found.flavour,
                asked=await _asked(request),
            )
            return await self._row.answer(call)

        return handler

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Of GET and HEAD the engines know the one that they name."""
        return APIRoute.matches(self, scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        found = await _found(request, self._layer, self._row)
        if found is None:
            raise _no_route(scope)
        request.state.compat = found
        request.state.shape = self._table.shape(found.flavour, self._row.failing)
        await APIRoute.handle(self, scope, receive, send)


def compat_routes(layers: Collection[str]) -> list[CompatRoute]:
    return [
        CompatRoute(
            f"/compat/{layer}/{{engine}}{row.path}", _endpoint, layer=layer, table=table, row=row
        )
        for layer, table in TABLES.items()
        if layer in layers
        for row in table.rows
    ]


async def _endpoint() -> None:
    """Never called: the route answers by its row."""


def _no_route(scope: Scope) -> HTTPException:
    """As if nothing had matched: no log and no figure names an endpoint either."""
    for name in ("route", "endpoint"):
        scope.pop(name, None)
    scope["path_params"] = {}
    return HTTPException(404)


async def _found(request: Request, layer: Layer, row: Row) -> _Open | None:
    rooms = rooms_of(request)
    engine_id = request.path_params["engine"]
    if not _ID.fullmatch(engine_id) or not rooms.exposures.may_take(layer, engine_id):
        return None
    engine = await rooms.ledger.engines.get(engine_id)
    if engine is None or engine.observed.capabilities is None:
        return None
    flavour = rooms.exposures.flavour_of(layer, engine_id, engine.registration.labels)
    if flavour is None or not row.backed(engine.observed.capabilities):
        return None
    return _Open(engine, flavour)


async def _asked(request: Request) -> Asked:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return Asked(tuple(request.query_params.multi_items()), await request.body(), kind)


def _name_of(layer: Layer, row: Row) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", row.path.partition("{")[0].lower()).strip("_")
    return f"{layer}_{words}"
