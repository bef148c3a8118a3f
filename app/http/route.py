"""The route class of every router: it fixes the order of checks.

FastAPI reads and parses a body before it asks any dependency. Here the caller's token and scopes
come first, then whether the engine is there for them, and only then what was sent: an answer never
tells a stranger more than that a token is needed, and nothing is parsed for one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from app.auth.requires import About, Declared, Need, declared
from app.domain.engine import Engine
from app.domain.errors import UnknownEngine
from app.http.refusals import (
    AnswerTimedOut,
    MalformedJson,
    MalformedRequest,
    MediaTypeRefused,
    SchemaViolation,
)
from app.http.rooms import rooms_of

_ID = re.compile(r"[\x21-\x7e]{1,128}")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class UndeclaredRoute(RuntimeError):
    """A route does not say which scopes it takes, nor that it is public."""


class EdgeRoute(APIRoute):
    """`any_query`: also parameters that the route does not name. `any_body`: its handler reads the
    body, of whatever type. `for_people`: browsers come here by themselves, and failures are pages
    to those that ask for one."""

    any_query: ClassVar[bool] = False
    any_body: ClassVar[bool] = False
    for_people: ClassVar[bool] = False

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # The names of handlers are the names in the OpenAPI document, and in the audit.
        self.unique_id = self.operation_id or self.name

    def get_route_handler(self) -> Handler:
        inner = super().get_route_handler()
        say = declaration_of(self)
        fields = list(_all_query_fields(self.dependant))
        known = frozenset(field.alias for field in fields)
        single = known - {field.alias for field in fields if _many(field)}

        async def within_its_time(request: Request) -> Response:
            limit_s = rooms_of(request).edge.request_timeout_s
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await handler(request)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise AnswerTimedOut from None

        async def handler(request: Request) -> Response:
            if say is None:
                raise UndeclaredRoute(self.name)  # never open by having been forgotten
            if say.need is not None:
                with rooms_of(request).allowances.judging(request):
                    await say.need.admit(request)
            if "engine" in request.path_params:
                engine = await _found(request, request.path_params["engine"])
                request.state.about = About(engine.id, engine.registration.labels)
                if say.need is not None:
                    await say.need.admit(request)
                request.state.engine = engine
            _check_query(request, None if self.any_query else known, single)
            if self.any_body:
                pass
            elif self.body_field is None:
                _check_no_body(request)
            else:
                await _check_body(request, required=self.body_field.field_info.is_required())
            return await inner(request)

        return within_its_time

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """HEAD is GET without the body, on every route."""
        if scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            return super().matches({**scope, "method": "GET"})
        return super().matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            await self.app(scope, receive, _without_body(send))
            return
        await super().handle(scope, receive, send)


class PageRoute(EdgeRoute):
    for_people = True


async def _found(request: Request, engine_id: str) -> Engine:
    if not _ID.fullmatch(engine_id):  # cannot be one, and not every database takes any text
        raise UnknownEngine("there is no such engine")
    return await rooms_of(request).fleet.engine(engine_id)


def declaration_of(route: APIRoute) -> Declared | None:
    return declared(dependant.call for dependant in route.dependant.dependencies)


def refuse_undeclared(app: FastAPI) -> None:
    """Raises UndeclaredRoute unless every route of the application says what it needs."""
    for route in app.routes:
        if not isinstance(route, EdgeRoute) or declaration_of(route) is None:
            raise UndeclaredRoute(f"the route {getattr(route, 'path', route)} declares no need")


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> str:
    """What `Allow` says for a path, over all the routes that it has."""
    methods: set[str] = set()
    for route in routes:
        if isinstance(route, EdgeRoute) and route.matches(scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


@dataclass(frozen=True, slots=True)
class RouteFound:
    """`need` None: open to all. `params`: what the path names."""

    name: str
    template: str
    need: Need | None
    params: dict[str, str]


def route_at(routes: Iterable[BaseRoute], method: str, path: str) -> RouteFound | None:
    """The route that a request would come to; None: 404 or 405."""
    scope = {"type": "http", "method": method.upper(), "path": path, "root_path": "", "headers": []}
    for route in routes:
        if not isinstance(route, EdgeRoute):
            continue
        match, found = route.matches(scope)
        say = declaration_of(route)
        if match is Match.FULL and say is not None:
            params = {name: str(value) for name, value in found.get("path_params", {}).items()}
            return RouteFound(route.name, route.path, say.need, params)
    return None


def _all_query_fields(dependant: Dependant) -> Iterator[Any]:
    yield from dependant.query_params
    for inner in dependant.dependencies:
        yield from _all_query_fields(inner)


def _many(field: Any) -> bool:
    origin = getattr(field.field_info.annotation, "__origin__", None)
    return origin in (list, tuple, set, frozenset)


def _check_query(request: Request, known: frozenset[str] | None, single: frozenset[str]) -> None:
    given = [name for name, _ in request.query_params.multi_items()]
    if known is not None and any(name not in known for name in given):
        allowed = f"known here: {', '.join(sorted(known))}" if known else "none are known here"
        raise SchemaViolation(f"There is an unknown query parameter; {allowed}.")
    if any(given.count(name) > 1 for name in single):
        raise SchemaViolation("A query parameter that takes one value is given twice.")


def _check_no_body(request: Request) -> None:
    announced = request.headers.get("content-length", "0")
    if announced != "0" or "transfer-encoding" in request.headers:
        raise MalformedRequest("No body is taken here.")


async def _check_body(request: Request, *, required: bool) -> None:
    """Parse the body once, strictly. FastAPI finds the same bytes in the request afterwards."""
    content = await request.body()
    if not content:
        if required:
            raise MalformedJson("A JSON body is needed.")
        return
    kinds = request.headers.getlist("content-type")
    if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeRefused
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeRefused
    try:
        parsed = json.loads(
            content.decode("utf-8"), object_pairs_hook=_no_twins, parse_constant=_no_constant
        )
    except (ValueError, RecursionError):
        raise MalformedJson("The body is not valid JSON, or has a name twice.") from None
    if not isinstance(parsed, dict):
        raise SchemaViolation("The body must be one JSON object.")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of two values for one name, one reader takes the first and another the last.
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _without_body(send: Send) -> Send:
    async def headers_only(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return headers_only


def one_header(request: Request, name: str) -> str | None:
    """The header's value; None: not sent. Raises MalformedRequest when it is there twice."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise MalformedRequest(f"{name} is there more than once.")
    return values[0].strip() if values else None
