"""The register of engines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from pydantic import AfterValidator, StringConstraints
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from app.auth.requires import permit_of
from app.domain.engine import Engine, HealthState
from app.domain.kinds import EngineRole
from app.domain.scopes import Scope
from app.http.addresses import refuse_taken
from app.http.bodies import ChangeEngineBody, FreezeBody, RegisterEngineBody
from app.http.documents.engine import EngineDocument, EnginePage
from app.http.labelling import refuse_beyond_policy, refuse_change_beyond_policy
from app.http.paging import PageSize, PageToken, clamp, next_link, text_of, token_of
from app.http.preconditions import expected_generation, revision_tag
from app.http.records import caller_of
from app.http.refusals import SchemaViolation
from app.http.replies import problems, reply
from app.http.rooms import House, VisibleEngine
from app.http.route import EdgeRoute, one_header
from app.http.routers.needs import MayManageEngines, MayRead
from app.ledger.values import EngineFilter

router = APIRouter(
    prefix="/v1/engines", tags=["engines"], route_class=EdgeRoute, responses=problems()
)

_LABEL = re.compile(r"[^=\x00-\x1f]+=[^\x00-\x1f]*")

Generation = Annotated[
    str | None,
    Header(alias="If-Match", description='`"g3"`: the `generation` that the change builds on'),
]

Why = Annotated[str | None, Query(max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


def _label(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise PydanticCustomError("form", "A label is written name=value.")
    return text


LabelFilter = Annotated[str, StringConstraints(max_length=128), AfterValidator(_label)]


@dataclass(frozen=True, slots=True)
class Listing:
    """Which engines a list is of, as query and as filter."""

    query: dict[str, Any]
    wanted: EngineFilter


async def _listing(
    request: Request,
    label: Annotated[
        list[LabelFilter], Query(description="`name=value`; several: all of them", max_length=16)
    ] = [],  # noqa: B006 - FastAPI copies it
    role: Annotated[list[EngineRole], Query()] = [],  # noqa: B006
    state: Annotated[list[HealthState], Query(description="Health")] = [],  # noqa: B006
    version: Annotated[
        str | None, Query(max_length=256, pattern=r"^[^\x00-\x1f]*$", description="Of the weights")
    ] = None,
) -> Listing:
    pairs = [text.partition("=") for text in label]
    labels = {name: value for name, _, value in pairs}
    if len(labels) != len(pairs):
        raise SchemaViolation("A label filter names each label once.")
    query = {"label": sorted(label), "role": sorted(role), "state": sorted(state)}
    return Listing(
        {**query, "version": version},
        EngineFilter(
            labels=labels,
            states=frozenset(state),
            roles=frozenset(role),
            version=version,
            sight=permit_of(request).sight(Scope.READ),
        ),
    )


@router.get("", response_model=EnginePage)
async def list_engines(
    who: MayRead,
    house: House,
    listing: Annotated[Listing, Depends(_listing)],
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Response:
    """The engines as last read, by id."""
    after = text_of(page_token, listing.query)
    page = await house.ledger.engines.page(listing.wanted, after, clamp(page_size))
    token = None if page.next is None else token_of(page.next, listing.query)
    query = {**listing.query, "page_size": clamp(page_size)}
    return reply(
        EnginePage(items=[EngineDocument.of(e) for e in page.items], next_page_token=token),
        headers=next_link("/v1/engines", query, token) if token else None,
    )


@router.post(
    "", status_code=201, response_model=EngineDocument, responses=problems(409, 413, 415, 501)
)
async def register_engine(
    who: MayManageEngines, house: House, request: Request, body: RegisterEngineBody
) -> Response:
    """Add an engine. Its addresses must lie within the gateway's `engine_reach`, and it must be one
    that the caller may manage by the gateway's policy."""
    draft = body.draft()
    await refuse_beyond_policy(request, draft)
    caller = caller_of(request, who, body.reason)
    judge = (
        None
        if body.allow_shared_address
        else partial(refuse_taken, request, draft.id, draft.members)
    )
    engine = await house.fleet.register(draft, caller, judge=judge)
    return _engine_reply(engine, status=201, headers={"Location": f"/v1/engines/{engine.id}"})


@router.get("/{engine}", response_model=EngineDocument, responses=problems(404))
async def get_engine(who: MayRead, house: House, engine: VisibleEngine) -> Response:
    """What it is and what is known of it. `ETag` stands for its administrative state."""
    return _engine_reply(engine)


@router.patch(
    "/{engine}", response_model=EngineDocument, responses=problems(404, 409, 412, 413, 415, 428)
)
async def change_engine(
    who: MayManageEngines,
    house: House,
    request: Request,
    engine: VisibleEngine,
    body: ChangeEngineBody,
    if_match: Generation = None,
) -> Response:
    """Change the registration. `If-Match: "g3"` is needed. Under a policy other labels must neither
    take it from the caller nor give the caller more."""
    expected = expected_generation(one_header(request, "if-match"))
    change = body.change()
    await refuse_change_beyond_policy(request, engine, change, expected)
    caller = caller_of(request, who, body.reason)
    judge = (
        None
        if body.allow_shared_address or change.members is None
        else partial(refuse_taken, request, engine.id, change.members, engine.registration.members)
    )
    changed = await house.fleet.change(engine.id, change, expected, caller, judge=judge)
    return _engine_reply(changed)


@router.delete("/{engine}", status_code=204, responses=problems(404, 409, 412, 428))
async def remove_engine(
    who: MayManageEngines,
    house: House,
    request: Request,
    engine: VisibleEngine,
    if_match: Generation = None,
    reason: Why = None,
) -> Response:
    """Take it off the register. Its history stays and its id is not used again."""
    expected = expected_generation(one_header(request, "if-match"))
    await house.fleet.remove(engine.id, expected, caller_of(request, who, reason))
    return Response(status_code=204)


@router.put("/{engine}/freeze", response_model=EngineDocument, responses=problems(404, 413, 415))
async def freeze_engine(
    who: MayManageEngines, house: House, request: Request, engine: VisibleEngine, body: FreezeBody
) -> Response:
    """Until then it takes no new orders (409 `ENGINE_FROZEN`), but those that override it. What
    runs goes on. Replaces an earlier freeze."""
    caller = caller_of(request, who, body.reason)
    return _engine_reply(await house.freezes.freeze(engine.id, body.reason, body.until, caller))


@router.delete("/{engine}/freeze", status_code=204, responses=problems(404))
async def thaw_engine(
    who: MayManageEngines,
    house: House,
    request: Request,
    engine: VisibleEngine,
    reason: Why = None,
) -> Response:
    """It takes orders again. Harmless where it is not frozen."""
    await house.freezes.thaw(engine.id, caller_of(request, who, reason))
    return Response(status_code=204)


def _engine_reply(
    engine: Engine, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    tag = revision_tag(engine)
    tagged = {} if tag is None else {"ETag": tag}
    return reply(EngineDocument.of(engine), status=status, headers={**tagged, **(headers or {})})
