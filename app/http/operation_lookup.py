"""The operation that a path names."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Depends, Path
from starlette.requests import Request

from app.domain.errors import UnknownOperation
from app.domain.operation import Operation
from app.http.rooms import rooms_of

OperationId = Annotated[str, Path(description="A UUID", json_schema_extra={"format": "uuid"})]


async def _known(request: Request, operation: OperationId) -> Operation:
    found = None
    if _is_id(operation):
        found = await rooms_of(request).ledger.operations.get(operation.lower())
    if found is None:
        raise UnknownOperation("there is no such operation")
    request.state.operation = found
    return found


def _is_id(text: str) -> bool:
    try:
        return str(UUID(text)) == text.lower()
    except ValueError:
        return False


KnownOperation = Annotated[Operation, Depends(_known)]
