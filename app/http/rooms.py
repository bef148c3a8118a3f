"""What the routes work with. It lives in the state of the application's lifespan, so that two
applications in one process share nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Path
from starlette.requests import Request

from app.auth.tokens.jwks import IssuerState
from app.clock import Clock, IdSource
from app.domain.engine import Engine
from app.http.closing import Closing
from app.http.tail import Tail
from app.ledger.ledger import Ledger
from app.observability.metrics import Metrics
from app.observability.refused_callers import RefusedCallers
from app.operations.fleet import Fleet
from app.operations.freezing import Freezes
from app.operations.orders import Orders
from app.operations.profiles import Profiles
from app.operations.sessions import Sessions
from app.operations.settling import Settlements


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """What the edge is told of the settings. `base_url` has no slash at its end."""

    base_url: str
    authorization_servers: tuple[str, ...] = ()
    max_streams: int = 512
    stream_max_s: float = 3600.0
    stream_send_timeout_s: float = 30.0
    stream_grace_s: float = 3.0
    ping_s: float = 15.0


@dataclass(slots=True)
class OpenStreams:
    """How many event streams are open now."""

    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    ledger: Ledger
    fleet: Fleet
    orders: Orders
    profiles: Profiles
    sessions: Sessions
    settlements: Settlements
    freezes: Freezes
    clock: Clock
    new_id: IdSource
    tail: Tail
    metrics: Metrics
    refused_callers: RefusedCallers
    edge: EdgeSettings
    closing: Closing
    issuer_states: Callable[[], tuple[IssuerState, ...]]
    streams: OpenStreams = field(default_factory=OpenStreams)


def rooms_of(request: Request) -> Rooms:
    return cast("Rooms", request.state.rooms)


async def _engine_of(
    request: Request, engine: Annotated[str, Path(description="The engine's id.")]
) -> Engine:
    del engine  # looked up by the route before anything else was read
    return cast("Engine", request.state.engine)


async def _house(request: Request) -> Rooms:
    return rooms_of(request)


# All dependencies here are coroutines, though none of them waits: FastAPI sends plain functions
# to a thread, which costs more than most of them do.
House = Annotated[Rooms, Depends(_house)]
VisibleEngine = Annotated[Engine, Depends(_engine_of)]
"""The engine that the path names, looked up after the caller's scopes were checked."""
