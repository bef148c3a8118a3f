"""Problems, for the OpenAPI document; `app.http.problems` writes them."""

from __future__ import annotations

from pydantic import BaseModel


class PlaceDocument(BaseModel):
    """Where something is wrong: a JSON pointer into the body, or a parameter's name."""

    pointer: str | None = None
    parameter: str | None = None
    detail: str


class ProblemDocument(BaseModel):
    """RFC 9457, with the members that every problem here has."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None
    code: str
    reason: str
    request_id: str | None
    trace_id: str | None
    retryable: bool
    errors: list[PlaceDocument]
    operation: str | None
