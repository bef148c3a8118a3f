"""What a route needs, said in its signature.

    async def pause(who: Annotated[Principal, Requires(Scope.PAUSE)], …)

A route that is open to all says so too, with `dependencies=[Public]`. `need_of` reads either off
the route, so that one which says nothing can be refused at start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from fastapi import Depends
from starlette.requests import Request

from app.auth.identities.known import LOCAL_ISSUER, Identities, IdentityRefused, Showing
from app.auth.policy.live import LivePolicy
from app.auth.policy.rules import Permit
from app.auth.principal import Principal, PrincipalKind
from app.auth.sessions.desk import SessionDesk
from app.auth.sessions.kept import Visitor
from app.auth.sessions.places import BACKGROUND_HEADER
from app.auth.tokens.bearer import DPOP, token_with_scheme
from app.auth.tokens.dpop import Shown
from app.auth.tokens.errors import PermissionDenied, ProofInvalid, TokenMissing
from app.domain.operation import Actor
from app.domain.scopes import Scope
from app.domain.selectors import Labels

_READING = frozenset({Scope.READ, Scope.AUDIT})


class ReadOnly(PermissionDenied):
    """The gateway is set to answer questions and take no orders."""

    reason = "GATEWAY_READ_ONLY"

    def __init__(self) -> None:
        super().__init__("This gateway is read only at present.")


class PersonNeeded(PermissionDenied):
    """The token does not show that a person stands behind the call."""

    reason = "PERSON_NEEDED"

    def __init__(self) -> None:
        super().__init__("This takes a person's token; the one shown does not show a person.")


class Verifier(Protocol):
    """What `app.auth.tokens.verifier.TokenVerifier` offers here."""

    async def verify(self, token: str) -> Principal: ...

    async def verify_bound(self, token: str, shown: Shown) -> Principal: ...

    async def still_good(self, token: str) -> Principal: ...


@dataclass(frozen=True, slots=True)
class Gate:
    """What decides who comes in; the application puts it into the state of each request as
    `gate`."""

    verifier: Verifier
    read_only: bool = False
    clients_count_as_persons: bool = False
    """What takes a person is open to programs too, unless the policy says something else."""
    policy: LivePolicy = field(default_factory=lambda: LivePolicy(None))
    dpop_at: str | None = None
    """Where callers find this service, which their proofs have to name; None: no proof is taken."""
    sessions: SessionDesk | None = None
    """Of people who logged in with a browser; None: cookies say nothing."""
    identities: Identities | None = None
    """Of callers of the compatible endpoints that can't send a token."""

    @property
    def takes_clients_for_persons(self) -> bool:
        policy = self.policy.policy
        said = None if policy is None else policy.clients_may_settle
        return self.clients_count_as_persons if said is None else said


class About(NamedTuple):
    """The engine that a request is about, put into its state as `about` once it is found."""

    engine_id: str
    labels: Labels


@dataclass(frozen=True, slots=True)
class Need:
    """All the scopes a route takes; none named: any caller who may administer at all.

    `person`: and the token has to show that a person holds it.
    """

    scopes: tuple[Scope, ...] = ()
    person: bool = False

    async def __call__(self, request: Request) -> Principal:
        return await self.admit(request)

    async def admit(self, request: Request) -> Principal:
        """Verify the caller's token and hold it to the scopes.

        Called before the body is read and again when the signature is filled in; the second
        time finds the principal in the request's own state. Nothing is kept between requests.
        Once it is known which engine the request is about, the scopes have to be left on that one.
        `asked_scopes` there: all that were asked of the caller, for the audit.

        Raises TokenRefused, IssuerUnavailable, InsufficientScope, RefusedByPolicy, ReadOnly,
        PersonNeeded, IdentityRefused; UnknownEngine, where the caller has no scope on the engine.
        """
        gate = cast("Gate", request.state.gate)
        known: Principal | None = getattr(request.state, "principal", None)
        if known is None:
            known = await _caller(gate, request)
            request.state.principal = known
            request.state.permit = gate.policy.permit(known)
        asked: tuple[Scope, ...] = getattr(request.state, "asked_scopes", ())
        request.state.asked_scopes = tuple(dict.fromkeys((*asked, *self.scopes)))
        about: About | None = getattr(request.state, "about", None)
        if about is None:
            permit_of(request).require(*self.scopes)
        else:
            permit_of(request).require_on(about.engine_id, about.labels, *self.scopes)
        refusal = refused_besides(
            self,
            known,
            read_only=gate.read_only,
            clients_too=gate.takes_clients_for_persons,
        )
        if refusal is not None:
            raise refusal
        return known

    async def again(self, request: Request) -> Permit:
        """Judge the caller's token anew, while an answer goes on: the key that it is signed with
        may have been withdrawn since, or the policy have changed. Raises as `admit`. The proof that
        came with a bound token was for the beginning, and is not asked for again."""
        gate = cast("Gate", request.state.gate)
        permit = gate.policy.permit(await _caller(gate, request, proven=True))
        permit.require(*self.scopes)
        return permit


async def _caller(gate: Gate, request: Request, *, proven: bool = False) -> Principal:
    sent = request.headers.getlist("authorization")
    without_token = caller_without_token(gate, request, token_sent=bool(sent))
    if without_token is not None:
        return without_token
    if not sent and gate.sessions is not None:
        # Whoever shows a token is judged by it alone: a cookie is sent without being asked.
        by_session = await caller_by_session(gate.sessions, request, going_on=proven)
        if by_session is not None:
            return by_session
    scheme, token = token_with_scheme(sent)
    if scheme != DPOP:
        return await gate.verifier.verify(token)
    if gate.dpop_at is None:
        raise TokenMissing
    if proven:
        return await gate.verifier.still_good(token)
    proofs = request.headers.getlist("dpop")
    if len(proofs) != 1:
        raise ProofInvalid("A DPoP-bound token takes one DPoP header with a proof.")
    # As it was sent: a proof names the escaped path.
    path = request.scope["raw_path"].decode("latin-1")
    shown = Shown(proof=proofs[0], method=request.method, url=f"{gate.dpop_at}{path}")
    return await gate.verifier.verify_bound(token, shown)


def caller_without_token(gate: Gate, request: Request, *, token_sent: bool) -> Principal | None:
    """Whoever the connection or the address proves; None: nobody. Whoever shows a token is judged
    by it alone, once the secret in the address, if there is one, is known to be good.

    Raises UnknownEngine, IdentityRefused.
    """
    # Of requests to compatible endpoints alone: see `app.http.middleware.identities`.
    shown: Showing | None = getattr(request.state, "shown", None)
    if shown is None or gate.identities is None:
        return None
    if token_sent:
        gate.identities.refuse_unknown(shown)
        return None
    try:
        return gate.identities.caller(shown)
    except IdentityRefused as refused:
        who = refused.identity
        request.state.actor = Actor(LOCAL_ISSUER, who.name, who.way)  # for the audit
        raise


async def caller_by_session(
    desk: SessionDesk, request: Request, *, going_on: bool
) -> Principal | None:
    """Whoever is logged in in this browser; None: it shows no session. `going_on`: for an answer
    that has begun already, which shows nobody at work; nor does a stream, which browsers open again
    by themselves, or what a page asks again and again.

    Raises SessionEnded, CrossSiteRefused, TokenInvalid, IssuerUnavailable, LedgerUnavailable.
    """
    session = await desk.found(request.headers.getlist("cookie"))
    if session is None:
        return None
    request.state.actor = session.actor  # for the audit, if it is refused from here on
    desk.place.refuse_cross_site(request.method, request.headers)
    streams = any("text/event-stream" in kind for kind in request.headers.getlist("accept"))
    by_itself = bool(request.headers.getlist(BACKGROUND_HEADER))
    in_use = not going_on and not streams and not by_itself
    return await desk.principal(session, visitor_of(request), in_use=in_use)


def visitor_of(request: Request) -> Visitor:
    ids = request.state.ids
    return Visitor(request_id=ids.request_id, trace_id=ids.trace_id, source=request.state.source)


def permit_of(request: Request) -> Permit:
    """Of the caller who was admitted."""
    return cast("Permit", request.state.permit)


def refused_besides(
    need: Need, caller: Principal, *, read_only: bool, clients_too: bool
) -> ReadOnly | PersonNeeded | None:
    """What the gateway's settings have against it, whatever scopes the caller has."""
    if read_only and not _READING.issuperset(need.scopes):
        return ReadOnly()
    if need.person and not clients_too and caller.kind is not PrincipalKind.PERSON:
        return PersonNeeded()
    return None


async def _nobody() -> None:
    """The declaration of a route that takes no token."""


Public = Depends(_nobody)


def Requires(*scopes: Scope, person: bool = False) -> Any:  # noqa: N802 - where a type's stands
    """`Annotated[Principal, Requires(Scope.PAUSE)]`: the caller, who holds all of `scopes`."""
    return Depends(Need(scopes, person))


@dataclass(frozen=True, slots=True)
class Declared:
    """What a route says about itself: a need, or public."""

    need: Need | None


def declared(calls: Iterable[Callable[..., Any] | None]) -> Declared | None:
    """Read the declaration among a route's dependencies; None: it says nothing.

    ValueError: it says two things, and which one holds would depend on their order.
    """
    found = [call for call in calls if isinstance(call, Need) or call is _nobody]
    if not found:
        return None
    if len(found) > 1:
        raise ValueError("a route declares its need once")
    return Declared(found[0] if isinstance(found[0], Need) else None)
