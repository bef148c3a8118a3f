"""Orders to an engine."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from app.http.bodies import (
    AbortRequestsBody,
    FlushCachesBody,
    PauseBody,
    ReleaseResourcesBody,
    RestoreResourcesBody,
    ResumeBody,
    ShutdownBody,
)
from app.http.calls import Call
from app.http.documents.operation import OperationDocument
from app.http.profile_bodies import StartProfileBody
from app.http.replies import problems
from app.http.route import EdgeRoute
from app.http.routers.needs import (
    MayAbort,
    MayFlush,
    MayManageResources,
    MayPause,
    MayProfile,
    MayReconfigure,
    MayShutDown,
    MayUpdateWeights,
)
from app.http.serving_bodies import ReconfigureServingBody
from app.http.weight_bodies import SetWeightVersionBody, UpdateWeightsBody

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "It had ended within the time to wait; or the plan of a `dry_run`",
        "content": {
            "application/json": {
                "schema": {
                    "anyOf": [
                        {"$ref": f"#/components/schemas/{OperationDocument.__name__}"},
                        {"type": "object", "title": "Plan"},
                    ]
                }
            }
        },
    },
    **problems(404, 409, 412, 413, 415, 501, 502),
}

router = APIRouter(
    prefix="/v1/engines/{engine}",
    tags=["orders"],
    route_class=EdgeRoute,
    responses=RESPONSES,
)


@router.post("/flush-caches", status_code=202, response_model=OperationDocument)
async def flush_caches(who: MayFlush, call: Call, body: FlushCachesBody) -> Response:
    """Drop what the named caches hold."""
    return await call.give(body, who)


@router.post("/pause", status_code=202, response_model=OperationDocument)
async def pause(who: MayPause, call: Call, body: PauseBody) -> Response:
    """Close admission, and finish, end or freeze what runs."""
    return await call.give(body, who)


@router.post("/resume", status_code=202, response_model=OperationDocument)
async def resume(who: MayPause, call: Call, body: ResumeBody) -> Response:
    """Lift the pause of that epoch, and no other."""
    return await call.give(body, who)


@router.post("/release-resources", status_code=202, response_model=OperationDocument)
async def release_resources(
    who: MayManageResources, call: Call, body: ReleaseResourcesBody
) -> Response:
    """Close admission and give memory back: of weights, KV cache, execution graphs."""
    return await call.give(body, who)


@router.post("/restore-resources", status_code=202, response_model=OperationDocument)
async def restore_resources(
    who: MayManageResources, call: Call, body: RestoreResourcesBody
) -> Response:
    """Take released memory again. It never opens admission."""
    return await call.give(body, who)


@router.post("/update-weights", status_code=202, response_model=OperationDocument)
async def update_weights(who: MayUpdateWeights, call: Call, body: UpdateWeightsBody) -> Response:
    """New weights on all ranks or on none. The result has the evidence of each rank."""
    return await call.update(body, who)


@router.post("/weight-version", status_code=202, response_model=OperationDocument)
async def set_weight_version(
    who: MayUpdateWeights, call: Call, body: SetWeightVersionBody
) -> Response:
    """Another name for the weights in place, which must be valid; nothing else changes. Only for
    engines that can be told so: over OpenEngineAdmin there is no such order."""
    return await call.give(body, who)


@router.post("/reconfigure", status_code=202, response_model=OperationDocument)
async def reconfigure(who: MayReconfigure, call: Call, body: ReconfigureServingBody) -> Response:
    """Another role, parallelism or limits. A failure leaves the shape that was."""
    return await call.give(body, who)


@router.post("/profiles", status_code=202, response_model=OperationDocument)
async def start_profile(who: MayProfile, call: Call, body: StartProfileBody) -> Response:
    """Record what the engine does. The operation ends when the files exist, and names them."""
    return await call.give(body, who)


@router.post("/abort-requests", status_code=202, response_model=OperationDocument)
async def abort_requests(who: MayAbort, call: Call, body: AbortRequestsBody) -> Response:
    """End requests by id, or all of them. The result has an outcome for each."""
    return await call.give(body, who)


@router.post("/shutdown", status_code=202, response_model=OperationDocument)
async def shut_down(who: MayShutDown, call: Call, body: ShutdownBody) -> Response:
    """End the engine. It has succeeded when the engine process is gone. Only for engines that can
    be told so."""
    return await call.give(body, who)
