"""Rendering: a document with its status and headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from app.domain.operation import Operation
from app.http.documents.operation import OperationDocument
from app.http.documents.problem import ProblemDocument
from app.http.problems import MEDIA_TYPE


def reply(
    document: BaseModel, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    content = document.model_dump_json()
    return Response(content, status, dict(headers or {}), "application/json")


def operation_reply(
    operation: Operation, *, accepted: bool, headers: Mapping[str, str] | None = None
) -> Response:
    """200 with what there is, or 202 where it has been taken on and has not ended."""
    path = f"/v1/operations/{operation.id}"
    links = {"Link": f'<{path}/events>; rel="monitor"; type="text/event-stream"'}
    pending = accepted and not operation.done
    if accepted:
        links["Location"] = path
    if pending:
        links["Retry-After"] = "1"
    return reply(
        OperationDocument.of(operation),
        status=202 if pending else 200,
        headers={**links, **(headers or {})},
    )


_FOR_TOKENS = (401, 403, 429, 503)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for the problems that a route with a need can answer, beside those of
    every route."""
    return {status: _problem() for status in sorted({*_FOR_TOKENS, *statuses})}


def problem_entry(status: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entry for one."""
    return {status: _problem()}


def problems_of_every_route() -> dict[str, dict[str, Any]]:
    """Malformed, misdirected, unknown parameters; and what is ours."""
    return {str(status): _problem() for status in (400, 421, 422, 500, 503, 504)}


def _problem() -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}
    return {"description": "A problem (RFC 9457)", "content": {MEDIA_TYPE: {"schema": schema}}}
