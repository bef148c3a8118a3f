"""The exception handlers: each way in which a request can fail leads to one problem document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app.domain.errors import ChadburnError
from app.http.pages import failure_page, prefers_page
from app.http.problems import problem_of
from app.http.records import record_refusal
from app.http.refusals import MalformedRequest, MethodRefused, NotThere, SchemaViolation
from app.http.rooms import Rooms
from app.http.route import EdgeRoute, allowed_methods

_Render = Callable[[ChadburnError, Scope], Response]

# Pydantic's own sentences for these say what is wanted and nothing of what came.
_TOLD = frozenset(
    {
        "missing",
        "extra_forbidden",
        "enum",
        "literal_error",
        "string_type",
        "string_too_short",
        "string_too_long",
        "string_pattern_mismatch",
        "int_type",
        "int_parsing",
        "int_from_float",
        "bool_type",
        "bool_parsing",
        "list_type",
        "tuple_type",
        "dict_type",
        "too_short",
        "too_long",
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "model_type",
        "model_attributes_type",
        "none_required",
        "timezone_aware",
        "form",  # our own
    }
)


def add_failure_handlers(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        return await _refused(request, error)

    async def not_routed(request: Request, error: Exception) -> Response:
        return await _refused(request, _of_framework(request, error))

    async def invalid(request: Request, error: Exception) -> Response:
        violation = SchemaViolation("The request does not fit the schema; see errors.")
        return await _refused(request, violation, errors=_places(request, error))

    app.add_exception_handler(ChadburnError, refused)
    app.add_exception_handler(HTTPException, not_routed)
    app.add_exception_handler(RequestValidationError, invalid)


async def _refused(
    request: Request, error: Exception, *, errors: Sequence[Mapping[str, str]] = ()
) -> Response:
    if not isinstance(error, ChadburnError):
        raise error
    rooms: Rooms | None = getattr(request.state, "rooms", None)
    answer = error if rooms is None else rooms.allowances.refused(request, error)
    await record_refusal(request, error, folded=answer is not error)
    shape: _Render | None = getattr(request.state, "shape", None)
    if shape is not None:  # the route speaks for an engine, whose clients know no other
        return shape(answer, request.scope)
    route = request.scope.get("route")
    if isinstance(route, EdgeRoute) and route.for_people and prefers_page(request):
        return failure_page(request, answer)
    return problem_of(answer, request.scope, errors=errors)


def _of_framework(request: Request, error: Exception) -> ChadburnError:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return NotThere()
    if status == 405:
        return MethodRefused(allowed_methods(request.app.routes, request.scope))
    return MalformedRequest("The request could not be read.")


def _places(request: Request, error: Exception) -> list[dict[str, str]]:
    """Where the schema was broken. Names that the caller made up are left out: an unknown field
    is reported at the object that holds it, with the names that are known there."""
    assert isinstance(error, RequestValidationError)
    route = request.scope.get("route")
    known = _field_names(route) if isinstance(route, EdgeRoute) else frozenset()
    found = []
    for fault in error.errors():
        where, *path = fault["loc"]
        detail = fault["msg"] if fault["type"] in _TOLD else "This value is not valid."
        if fault["type"] == "extra_forbidden":
            detail = "There is an unknown field here."
            path = path[:-1]
        if where == "body":
            found.append({"pointer": _pointer(path, known), "detail": detail})
        else:
            name = str(path[0]) if path else str(where)
            found.append({"parameter": name, "detail": detail})
    return found


def _pointer(path: Iterable[Any], known: frozenset[str]) -> str:
    parts: list[str] = []
    for part in path:
        if not isinstance(part, int) and part not in known:
            break
        parts.append(str(part))
    return "".join(f"/{part}" for part in parts)


def _field_names(route: EdgeRoute) -> frozenset[str]:
    """Every field name of the route's body, nested ones included."""
    names: set[str] = set()
    if route.body_field is not None:
        _collect(route.body_field.field_info.annotation, names)
    return frozenset(names)


def _collect(annotation: Any, names: set[str]) -> None:
    fields = getattr(annotation, "model_fields", None)
    if fields is not None:
        for name, field in fields.items():
            names.add(name)
            _collect(field.annotation, names)
    for inner in getattr(annotation, "__args__", ()):
        _collect(inner, names)
