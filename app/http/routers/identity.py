"""Who the caller is, and where tokens come from."""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast
from urllib.parse import urlsplit

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.auth.policy.rules import Grant, Permit
from app.auth.principal import PrincipalKind
from app.auth.requires import Gate, Public, permit_of
from app.domain.kinds import OperationKind
from app.domain.scopes import Scope
from app.domain.selectors import Selector
from app.http.refusals import NotThere
from app.http.replies import problems, reply
from app.http.rooms import House, Rooms
from app.http.route import EdgeRoute
from app.http.routers.needs import MayAdminister

router = APIRouter(tags=["identity"], route_class=EdgeRoute)

METADATA_PATH = "/.well-known/oauth-protected-resource"
_CACHED = {"Cache-Control": "public, max-age=300"}


class EnginesDocument(BaseModel):
    """Which engines: those that meet all of it. Null and empty mean whatever it is."""

    id: list[str] | None = Field(description="One of these")
    labels: dict[str, list[str]] = Field(description="Has each, with one of the values")
    without: dict[str, list[str]] = Field(description="Has none of these with one of the values")

    @classmethod
    def of(cls, selector: Selector) -> EnginesDocument:
        return cls(
            id=None if selector.ids is None else sorted(selector.ids),
            labels={name: sorted(values) for name, values in sorted(selector.labels.items())},
            without={name: sorted(values) for name, values in sorted(selector.without.items())},
        )


class PermissionDocument(BaseModel):
    scopes: list[str]
    engines: EnginesDocument


class MeDocument(BaseModel):
    issuer: str
    subject: str
    client_id: str
    kind: PrincipalKind
    groups: list[str]
    scopes: list[str] = Field(description="Those that are left on some engine, there or not")
    permissions: list[PermissionDocument] = Field(
        description="The scopes by engine. What is allowed on an engine is the union of those that "
        "fit it"
    )
    expires_at: datetime
    read_only: bool = Field(description="This gateway takes no orders and changes at present")
    reason_required: list[OperationKind] = Field(
        description="Orders that the policy takes with a `reason` only"
    )

    @classmethod
    def of(cls, permit: Permit, gate: Gate) -> MeDocument:
        who, policy = permit.caller, gate.policy.policy
        grants = permit.grants
        if grants is None:
            grants = (Grant("", permit.scopes(), Selector()),)
        return cls(
            issuer=who.issuer,
            subject=who.subject,
            client_id=who.client_id,
            kind=who.kind,
            groups=sorted(who.groups),
            scopes=[str(scope) for scope in sorted(permit.scopes())],
            permissions=[
                PermissionDocument(
                    scopes=sorted(grant.scopes), engines=EnginesDocument.of(grant.engines)
                )
                for grant in grants
            ],
            expires_at=who.expires_at,
            read_only=gate.read_only,
            reason_required=[] if policy is None else sorted(policy.require_reason),
        )


class ResourceDocument(BaseModel):
    """RFC 9728 section 2, with one member of our own."""

    resource: str
    authorization_servers: list[str]
    scopes_supported: list[str]
    bearer_methods_supported: list[str]
    dpop_signing_alg_values_supported: list[str] | None = None
    dpop_bound_access_tokens_required: bool | None = None
    resource_name: str
    resource_documentation: str
    chadburn_audiences: dict[str, str] = Field(
        description="By issuer: what to ask it for, so that its token is for this gateway"
    )


def metadata_url(base_url: str) -> str:
    """Where the metadata of the resource `base_url` is: a path of it goes behind the well-known
    one (RFC 9728 section 3.1)."""
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc}{METADATA_PATH}{parts.path.rstrip('/')}"


@router.get("/v1/me", response_model=MeDocument, responses=problems())
async def read_me(who: MayAdminister, request: Request) -> Response:
    """The caller, as its token describes it, and what the policy leaves of its scopes."""
    return reply(MeDocument.of(permit_of(request), cast("Gate", request.state.gate)))


@router.get(METADATA_PATH, response_model=ResourceDocument, dependencies=[Public])
async def read_metadata(house: House) -> Response:
    """Which issuers this gateway takes tokens from, and which scopes there are (RFC 9728)."""
    return JSONResponse(_metadata(house, house.edge.base_url), headers=_CACHED)


@router.get(METADATA_PATH + "/{path:path}", dependencies=[Public], include_in_schema=False)
async def read_metadata_of_path(house: House, path: str) -> Response:
    """The same for a resource with a path: the gateway's own, or its API."""
    parts = urlsplit(house.edge.base_url)
    if f"/{path}" not in {parts.path, f"{parts.path}/v1"}:
        raise NotThere
    return JSONResponse(
        _metadata(house, f"{parts.scheme}://{parts.netloc}/{path}"), headers=_CACHED
    )


def _metadata(house: Rooms, resource: str) -> dict[str, Any]:
    return ResourceDocument(
        resource=resource,
        authorization_servers=list(house.edge.authorization_servers),
        scopes_supported=sorted(Scope),
        bearer_methods_supported=["header"],
        dpop_signing_alg_values_supported=list(house.edge.proof_algorithms) or None,
        dpop_bound_access_tokens_required=house.edge.proofs_required or None,
        resource_name="Chadburn",
        resource_documentation=f"{house.edge.base_url}/problems",
        chadburn_audiences=dict(house.edge.audiences),
    ).model_dump(mode="json", exclude_none=True)
