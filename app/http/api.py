"""The application as HTTP sees it: routers, layers around them, and what happens on failure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app import __version__
from app.auth.requires import Public
from app.clock import IdSource, uuid7
from app.http.compat.routing import compat_routes
from app.http.failures import add_failure_handlers
from app.http.middleware.context import Context
from app.http.middleware.doors import Doors
from app.http.middleware.identities import CompatIdentities
from app.http.openapi import add_openapi
from app.http.route import EdgeRoute, RouteFound, refuse_undeclared, route_at
from app.http.routers import (
    adapters,
    audit,
    dashboard,
    discovery,
    engines,
    events,
    health,
    identity,
    login,
    operations,
    orders,
    problem_pages,
    profiles,
    session_page,
)
from app.observability.metrics import Metrics

OF_THE_KIND = frozenset({"cancel", "settle"})
"""Routes that also take the scope of the operation's own kind."""

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[dict[str, Any]]]

_ROUTERS = (
    engines.router,
    discovery.router,
    orders.router,
    adapters.router,
    profiles.router,
    operations.router,
    events.router,
    audit.router,
    identity.router,
    login.router,
    login.for_people,
    login.brought,
    login.by_issuers,
    session_page.router,
    dashboard.router,
    health.router,
    problem_pages.router,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """`trusted_proxies`: addresses and networks whose X-Forwarded-For is believed."""

    allowed_hosts: tuple[str, ...]
    max_body_bytes: int = 1 << 20
    max_update_bytes: int = 16 << 20
    max_bodies_bytes: int = 64 << 20
    max_concurrent_requests: int = 256
    max_concurrent_changes: int = 192
    receive_timeout_s: float = 30.0
    trusted_proxies: tuple[str, ...] = ()
    https: bool = False
    compat: frozenset[str] = frozenset()
    """By whose endpoints of their own some engines are reached, as `Layer` has it."""


def build_api(
    settings: ApiSettings,
    *,
    metrics: Metrics,
    lifespan: Lifespan,
    new_id: IdSource,
    new_trace_id: Callable[[], str],
) -> FastAPI:
    """`lifespan` gives the state of each request: `rooms`, `gate` and `resource_metadata`.

    Raises UndeclaredRoute.
    """
    app = FastAPI(
        title="Chadburn",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        # Its records quote what was sent.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        middleware=_layers(settings, metrics, new_id, new_trace_id),
    )
    for router in _ROUTERS:
        # Each route as it is: an included router would wrap it, and `declares` be one step away.
        app.router.routes.extend(router.routes)
    app.router.routes.extend(compat_routes(settings.compat))
    app.router.routes.append(_openapi_route(app))
    add_failure_handlers(app)
    add_openapi(app)
    refuse_undeclared(app)
    return app


def found_route(
    method: str, path: str, *, compat: frozenset[str] = frozenset()
) -> RouteFound | None:
    """The route that a request would come to; None: 404 or 405. Serves nothing. `compat`: with
    these compatible endpoints, whichever engine has them."""
    app = build_api(
        ApiSettings(allowed_hosts=(), compat=compat),
        metrics=Metrics(),
        lifespan=_nothing,
        new_id=uuid7,
        new_trace_id=lambda: "",
    )
    return route_at(app.routes, method, path)


@asynccontextmanager
async def _nothing(_app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    yield {}


def _layers(
    settings: ApiSettings, metrics: Metrics, new_id: IdSource, new_trace_id: Callable[[], str]
) -> list[Middleware]:
    """Outermost first."""
    layers = [
        Middleware(
            Context,
            metrics=metrics,
            new_id=new_id,
            new_trace_id=new_trace_id,
            https=settings.https,
        ),
        Middleware(CompatIdentities),
        Middleware(
            Doors,
            allowed_hosts=settings.allowed_hosts,
            max_body_bytes=settings.max_body_bytes,
            max_update_bytes=settings.max_update_bytes,
            max_bodies_bytes=settings.max_bodies_bytes,
            max_concurrent=settings.max_concurrent_requests,
            max_changing=settings.max_concurrent_changes,
            receive_timeout_s=settings.receive_timeout_s,
        ),
    ]
    if settings.trusted_proxies:
        trusted = list(settings.trusted_proxies)
        layers.insert(0, Middleware(ProxyHeadersMiddleware, trusted_hosts=trusted))
    return layers


def _openapi_route(app: FastAPI) -> APIRoute:
    async def openapi() -> Response:
        return JSONResponse(app.openapi())

    return EdgeRoute("/openapi.json", openapi, dependencies=[Public], include_in_schema=False)
