"""LoRA adapters of an engine."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import Response

from app.domain.errors import UnsupportedOperation
from app.domain.kinds import OperationKind
from app.http.adapter_bodies import ONE_LINE, LoadLoraBody, UnloadLoraBody
from app.http.calls import Call
from app.http.documents.adapters import AdaptersDocument
from app.http.documents.operation import OperationDocument
from app.http.replies import problems, reply
from app.http.rooms import AsksTheEngine, House, VisibleEngine
from app.http.route import EdgeRoute
from app.http.routers.needs import MayManageAdapters, MayRead
from app.http.routers.orders import RESPONSES

router = APIRouter(
    prefix="/v1/engines/{engine}/loras",
    tags=["adapters"],
    route_class=EdgeRoute,
)

AdapterInPath = Annotated[
    str,
    Path(min_length=1, max_length=256, pattern=ONE_LINE, description="May have slashes in it."),
]


@router.get(
    "",
    response_model=AdaptersDocument,
    responses=problems(404, 501, 502),
    dependencies=[AsksTheEngine],
)
async def list_loras(who: MayRead, house: House, engine: VisibleEngine) -> Response:
    """What is loaded, asked now."""
    found = await house.fleet.discover(engine.id)
    if OperationKind.LOAD_LORA not in found.capabilities.operations:
        raise UnsupportedOperation("this engine does not offer adapters")
    return reply(AdaptersDocument.of(found.facts))


@router.post("", status_code=202, response_model=OperationDocument, responses=RESPONSES)
async def load_lora(who: MayManageAdapters, call: Call, body: LoadLoraBody) -> Response:
    """Load an adapter on all ranks."""
    return await call.give(body, who)


@router.delete(
    "/{name:path}", status_code=202, response_model=OperationDocument, responses=RESPONSES
)
async def unload_lora(
    who: MayManageAdapters, call: Call, name: AdapterInPath, body: UnloadLoraBody | None = None
) -> Response:
    """Unload an adapter from all ranks. One that requests use stays, and the order fails."""
    body = body or UnloadLoraBody.model_validate({})
    return await call.give(body, who, body.unload(name))
