"""Questions that go to the engine itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.http.documents.discovery import (
    CapabilitiesDocument,
    InfoDocument,
    KvEventSourcesDocument,
    LoadDocument,
    LoadHistoryDocument,
    ModelsDocument,
    WeightVersionDocument,
)
from app.http.moments import Since
from app.http.replies import problems, reply
from app.http.rooms import AsksTheEngine, House, VisibleEngine
from app.http.route import EdgeRoute
from app.http.routers.needs import MayRead

router = APIRouter(
    prefix="/v1/engines/{engine}",
    tags=["discovery"],
    route_class=EdgeRoute,
    responses=problems(404, 502),
    dependencies=[AsksTheEngine],
)


@router.get("/capabilities", response_model=CapabilitiesDocument)
async def get_capabilities(who: MayRead, house: House, engine: VisibleEngine) -> Response:
    """What it says it can do, asked now."""
    found = await house.fleet.discover(engine.id)
    return reply(CapabilitiesDocument.of(found.capabilities))


@router.get("/info", response_model=InfoDocument)
async def get_info(who: MayRead, house: House, engine: VisibleEngine) -> Response:
    """What it is, asked now."""
    found = await house.fleet.discover(engine.id)
    return reply(
        InfoDocument(engine=engine.id, observed_at=found.facts.observed_at, info=dict(found.info))
    )


@router.get("/models", response_model=ModelsDocument)
async def get_models(who: MayRead, house: House, engine: VisibleEngine) -> Response:
    """What it serves, asked now."""
    found = await house.fleet.discover(engine.id)
    return reply(ModelsDocument(items=[dict(model) for model in found.models]))


@router.get("/load", response_model=LoadDocument | LoadHistoryDocument)
async def get_load(
    who: MayRead,
    house: House,
    engine: VisibleEngine,
    since: Annotated[
        Since | None, Query(description="Give what was seen since then, one hour at most")
    ] = None,
) -> Response:
    """How busy it is: asked now, or as this gateway saw it since a time."""
    if since is not None:
        seen = await house.fleet.load_history(engine.id, since)
        items = [LoadDocument(at=sample.at, load=dict(sample.load)) for sample in seen]
        return reply(LoadHistoryDocument(items=items))
    load = await house.fleet.load_of(engine)
    return reply(LoadDocument(at=house.clock.now(), load=dict(load)))


@router.get("/weight-version", response_model=WeightVersionDocument)
async def get_weight_version(who: MayRead, house: House, engine: VisibleEngine) -> Response:
    """Which weights it serves with, asked now."""
    found = await house.fleet.discover(engine.id)
    return reply(WeightVersionDocument.of(found.facts))


@router.get("/kv-event-sources", response_model=KvEventSourcesDocument, responses=problems(501))
async def get_kv_event_sources(who: MayRead, house: House, engine: VisibleEngine) -> Response:
    """Where its cache events can be subscribed to, asked now."""
    found = await house.fleet.kv_event_sources(engine.id)
    return reply(KvEventSourcesDocument(items=[dict(source) for source in found]))
