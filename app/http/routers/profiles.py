"""Profiles that were recorded: stopped, listed, and fetched."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from app.domain.operation import Operation
from app.http.bodies import CancelBody
from app.http.calls import PreferHeader, awaited
from app.http.documents.operation import OperationDocument
from app.http.documents.profiles import ProfileDocument, ProfilePage
from app.http.downloads import MEDIA_TYPES, FileReply
from app.http.negotiation import preference_of
from app.http.paging import PageSize, PageToken, clamp, next_link, number_of, token_of
from app.http.records import caller_of
from app.http.replies import operation_reply, problems, reply
from app.http.rooms import House, VisibleEngine, rooms_of
from app.http.route import EdgeRoute
from app.http.routers.needs import MayProfile

router = APIRouter(
    prefix="/v1/engines/{engine}/profiles",
    tags=["profiles"],
    route_class=EdgeRoute,
    responses=problems(404),
)

ProfileId = Annotated[str, Path(description="Of its operation, or what the engine calls it")]


async def _known(request: Request, engine: VisibleEngine, profile: ProfileId) -> Operation:
    found = await rooms_of(request).profiles.find(engine.id, profile)
    request.state.operation = found
    return found


KnownProfile = Annotated[Operation, Depends(_known)]


@router.get("", response_model=ProfilePage)
async def list_profiles(
    who: MayProfile,
    house: House,
    engine: VisibleEngine,
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Response:
    """Those that were ordered here, newest first."""
    asked = {"profiles_of": engine.id}
    page = await house.profiles.page(engine.id, number_of(page_token, asked), clamp(page_size))
    token = None if page.next is None else token_of(page.next, asked)
    downloadable = house.profiles.downloadable(engine.id)
    items = [ProfileDocument.of(one, downloadable=downloadable) for one in page.items]
    path = f"/v1/engines/{engine.id}/profiles"
    return reply(
        ProfilePage(items=items, next_page_token=token),
        headers=next_link(path, {"page_size": clamp(page_size)}, token) if token else None,
    )


@router.get("/{profile}", response_model=ProfileDocument)
async def get_profile(
    who: MayProfile, house: House, engine: VisibleEngine, profile: KnownProfile
) -> Response:
    """How it stands, and its files."""
    downloadable = house.profiles.downloadable(engine.id)
    return reply(ProfileDocument.of(profile, downloadable=downloadable))


@router.post(
    "/{profile}/stop",
    status_code=202,
    response_model=OperationDocument,
    responses={
        200: {"description": "It has ended", "model": OperationDocument},
        **problems(404, 409, 413, 415, 501, 502),
    },
)
async def stop_profile(
    who: MayProfile,
    house: House,
    request: Request,
    profile: KnownProfile,
    body: CancelBody | None = None,
    prefer: PreferHeader = None,
) -> Response:
    """Record no more, and write the files: its operation then ends. Takes no key; stopping it again
    changes nothing."""
    note = None if body is None else body.reason
    stopped = await house.profiles.stop(profile, caller_of(request, who, note))
    preference = house.waiting.honoured(preference_of(request.headers.getlist("prefer")))
    if preference.wait_s and not stopped.done:
        stopped = await awaited(request, stopped, preference.wait_s)
    return operation_reply(stopped, accepted=True, headers=preference.headers)


@router.get(
    "/{profile}/artifact",
    status_code=200,
    response_class=FileReply,
    responses={
        200: {
            "description": "The file, checked against its size and SHA-256",
            "content": {kind: {} for kind in MEDIA_TYPES},
        },
        **problems(404, 409, 501, 502),
    },
)
async def get_profile_artifact(
    who: MayProfile,
    house: House,
    request: Request,
    profile: KnownProfile,
    rank: Annotated[
        int | None, Query(ge=0, le=65535, description="May be left out where there is one alone")
    ] = None,
) -> Response:
    """The file of one rank, where the gateway can read it. Each download is audited."""
    artifact, file = await house.profiles.artifact(profile, rank, caller_of(request, who))
    return FileReply(
        artifact,
        file,
        f"{profile.id}-{artifact.name}",
        send_timeout_s=house.edge.stream_send_timeout_s,
    )
