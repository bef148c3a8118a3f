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


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for the problems that a route can answer beside those of every route."""
    everywhere = (400, 401, 403, 422, 503)
    return {
        status: {
            "description": "A problem (RFC 9457)",
            "content": {MEDIA_TYPE: {"schema": {"$ref": _PROBLEM}}},
        }
        for status in sorted({*everywhere, *statuses})
    }


_PROBLEM = f"#/components/schemas/{ProblemDocument.__name__}"
