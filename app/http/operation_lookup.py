"""The operation that a path names."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Depends, Path
from starlette.requests import Request

from app.auth.requires import About, permit_of
from app.domain.errors import UnknownEngine, UnknownOperation
from app.domain.operation import Operation
from app.http.rooms import rooms_of
from app.http.route import EdgeRoute, declaration_of

OperationId = Annotated[str, Path(description="A UUID", json_schema_extra={"format": "uuid"})]


async def _known(request: Request, operation: OperationId) -> Operation:
    found = None
    if _is_id(operation):
        found = await rooms_of(request).ledger.operations.get(operation.lower())
    if not permit_of(request).unlimited:
        found = await _if_visible(request, found)
    if found is None:
        raise UnknownOperation("there is no such operation")
    request.state.operation = found
    return found


async def _if_visible(request: Request, operation: Operation | None) -> Operation | None:
    """None: its engine is not there for the caller. Raises RefusedByPolicy where it is, and the
    scopes are not left on it."""
    # Asked whatever was found: how long the answer takes does not tell either.
    engine_id = "" if operation is None else operation.engine_id
    labels = await rooms_of(request).ledger.engines.labels(engine_id)
    if operation is None:
        return None
    request.state.about = About(engine_id, labels[engine_id])
    try:
        await _admit_again(request)
    except UnknownEngine:
        return None
    return operation


async def _admit_again(request: Request) -> None:
    route = request.scope["route"]
    assert isinstance(route, EdgeRoute)
    declared = declaration_of(route)
    assert declared is not None
    assert declared.need is not None, "operations are for those who may see them"
    await declared.need.admit(request)


def _is_id(text: str) -> bool:
    try:
        return str(UUID(text)) == text.lower()
    except ValueError:
        return False


KnownOperation = Annotated[Operation, Depends(_known)]
