"""What the routes work with. It lives in the state of the application's lifespan, so that two
applications in one process share nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, cast
from urllib.parse import urlsplit

from fastapi import Depends, Path
from starlette.requests import Request

from app.auth.principal import Principal
from app.auth.sessions.desk import SessionDesk
from app.auth.sessions.logins import Logins
from app.auth.tokens.jwks import IssuerState
from app.clock import Clock, IdSource
from app.domain.engine import Engine
from app.domain.operation import Actor
from app.http.allowances import Allowances
from app.http.closing import Closing
from app.http.compat.announcements import Announcements
from app.http.compat.exposures import Exposures
from app.http.dashboard import DashboardFiles, dashboard_files
from app.http.payloads import PayloadRule
from app.http.refusals import TooManyStreams
from app.http.roster import Roster
from app.http.tail import Tail
from app.http.waiting import Waiting
from app.ledger.ledger import Ledger
from app.observability.metrics import Metrics
from app.observability.refused_callers import RefusedCallers
from app.operations.fleet import Fleet
from app.operations.freezing import Freezes
from app.operations.groups import Groups
from app.operations.orders import Orders
from app.operations.profiles import Profiles
from app.operations.round_trips import RoundTrips
from app.operations.sessions import Sessions
from app.operations.settling import Settlements


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """What the edge is told of the settings. `base_url` has no slash at its end."""

    base_url: str
    authorization_servers: tuple[str, ...] = ()
    audiences: Mapping[str, str] = field(default_factory=dict)
    """By issuer: what its tokens for this gateway are made for."""
    proof_algorithms: tuple[str, ...] = ()
    """Of DPoP; none: bound tokens are not taken."""
    proofs_required: bool = False
    request_timeout_s: float = 60.0
    stream_max_s: float = 3600.0
    stream_send_timeout_s: float = 30.0
    stream_grace_s: float = 3.0
    stream_look_s: float = 15.0
    """How long at most until a stream reads the clock again, and asks whether its caller may still
    have it."""
    ping_s: float = 15.0


@dataclass(slots=True)
class OpenStreams:
    """How many event streams are open now, of all callers and of each."""

    most: int = 512
    most_of_caller: int = 256
    count: int = 0
    _of_caller: Counter[Actor] = field(default_factory=Counter)

    def refuse_if_full(self, who: Principal) -> None:
        """Raises TooManyStreams."""
        if self.count >= self.most:
            raise TooManyStreams("As many event streams are open as may be.")
        if self._of_caller.get(_identity_of(who), 0) >= self.most_of_caller:
            raise TooManyStreams("You have as many event streams open as one caller may.")

    @contextmanager
    def one_more(self, who: Principal) -> Iterator[None]:
        """For the time of the block. Raises TooManyStreams."""
        self.refuse_if_full(who)
        caller = _identity_of(who)
        self.count += 1
        self._of_caller[caller] += 1
        try:
            yield
        finally:
            self.count -= 1
            self._of_caller[caller] -= 1
            if not self._of_caller[caller]:
                del self._of_caller[caller]


def _identity_of(who: Principal) -> Actor:
    return Actor(who.issuer, who.subject, who.client_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    ledger: Ledger
    fleet: Fleet
    orders: Orders
    profiles: Profiles
    sessions: Sessions
    settlements: Settlements
    freezes: Freezes
    groups: Groups
    clock: Clock
    new_id: IdSource
    tail: Tail
    metrics: Metrics
    refused_callers: RefusedCallers
    edge: EdgeSettings
    closing: Closing
    issuer_states: Callable[[], tuple[IssuerState, ...]]
    policy_ok: Callable[[], bool]
    roster: Roster
    finding_ok: Callable[[], bool] = lambda: True
    """Whether what the sources of engines say now is what is followed."""
    logins: Logins | None = None
    """None: nobody logs in with a browser here."""
    browser_sessions: SessionDesk | None = None
    streams: OpenStreams = field(default_factory=OpenStreams)
    waiting: Waiting = field(default_factory=Waiting)
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    allowances: Allowances = field(default_factory=Allowances)
    exposures: Exposures = field(default_factory=Exposures)
    payloads: PayloadRule = field(default_factory=PayloadRule)
    """Of engines' own endpoints."""
    announcements: Announcements = field(default_factory=Announcements)
    dashboard: DashboardFiles = field(default_factory=dashboard_files)


def rooms_of(request: Request) -> Rooms:
    return cast("Rooms", request.state.rooms)


def prefix_of(rooms: Rooms) -> str:
    """Of all paths of the gateway as callers see them; empty, or with a slash at its front."""
    return urlsplit(rooms.edge.base_url).path.rstrip("/")


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


async def _round_trip(request: Request, engine: VisibleEngine) -> AsyncIterator[None]:
    with rooms_of(request).round_trips.one_more(engine.id):
        yield


AsksTheEngine = Depends(_round_trip)
"""The answer is the engine's own: only so many callers may wait for one."""
