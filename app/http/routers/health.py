"""Whether it lives, whether it can work, and its figures."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from app.auth.requires import Public, permit_of
from app.domain.scopes import Scope
from app.http.readiness import exposition, is_degraded, refuse_unless_ready
from app.http.replies import problems, reply
from app.http.rooms import House
from app.http.route import EdgeRoute
from app.http.routers.needs import MayRead
from app.observability.metrics import CONTENT_TYPE

router = APIRouter(tags=["health"], route_class=EdgeRoute)


class LiveDocument(BaseModel):
    status: Literal["alive"] = "alive"


class ReadyDocument(BaseModel):
    """`degraded`: tokens of some issuer can't be judged at present, or a changed policy file or
    list of engines was refused and the earlier one stays in force; all else works."""

    status: Literal["ready", "degraded"]


@router.get("/healthz", response_model=LiveDocument, dependencies=[Public])
async def healthz() -> Response:
    """The process can answer."""
    return reply(LiveDocument())


@router.get("/readyz", response_model=ReadyDocument, dependencies=[Public], responses=problems())
async def readyz(house: House) -> Response:
    """The database answers and has this release's schema."""
    await refuse_unless_ready(house)
    return reply(ReadyDocument(status="degraded" if is_degraded(house) else "ready"))


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **problems()})
async def metrics(who: MayRead, house: House, request: Request) -> Response:
    """For Prometheus. A listener of its own, set by `metrics_port`, takes no token."""
    sight = permit_of(request).sight(Scope.READ)
    return Response(await exposition(house, sight), media_type=CONTENT_TYPE)
