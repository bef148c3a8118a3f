"""The OpenAPI 3.1 document: FastAPI's, with what it cannot know by itself."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.http.documents.problem import ProblemDocument
from app.http.replies import problems_of_every_route
from app.http.route import EdgeRoute, declaration_of

_REF = "#/components/schemas/{model}"
_BEARER = "bearer"

DESCRIPTION = """Orders to inference engines, each authorised by its own scope, kept in a ledger,
and followed to its end.

A browser in which somebody has logged in (`/auth/login`) shows the cookie of their session in the
place of a token. Changes then take `X-Requested-With: chadburn`, from the gateway's own origin.

An order answers 202 at once with an operation; its events are a stream. `Idempotency-Key` makes
an order safe to send again. Every answer that is not a success is a problem document (RFC 9457)
whose `type` leads to a page about its reason."""


def add_openapi(app: FastAPI) -> None:
    """Let the application describe itself. Made once, at the first question."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="Chadburn",
        version=app.version,
        openapi_version="3.1.0",
        description=DESCRIPTION,
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    described = ProblemDocument.model_json_schema(ref_template=_REF)
    schemas.update(described.pop("$defs", {}))
    schemas[ProblemDocument.__name__] = described
    document["components"]["securitySchemes"] = {
        _BEARER: {
            "type": "http",
            "scheme": "bearer",
            "description": "An access token of a configured issuer, made for this gateway. "
            "`/.well-known/oauth-protected-resource` names the issuers.",
        }
    }
    for route in app.routes:
        if isinstance(route, EdgeRoute) and route.include_in_schema:
            _declare_need(document, route)
    for path in document["paths"].values():
        for operation in path.values():
            # Every route refuses unknown query parameters; FastAPI would declare its own shape.
            operation["responses"].update(problems_of_every_route())
    return document


def _declare_need(document: dict[str, Any], route: EdgeRoute) -> None:
    declared = declaration_of(route)
    if declared is None or declared.need is None:
        return
    scopes = [scope.value for scope in declared.need.scopes]
    for method in route.methods or ():
        operation = document["paths"][route.path_format].get(method.lower())
        if operation is not None:
            # In 3.1 a scheme other than oauth2 may list the roles that it takes.
            operation["security"] = [{_BEARER: scopes}]
