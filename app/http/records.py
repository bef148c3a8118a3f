"""What the edge writes into the audit: refusals that no use case saw, and reads of the audit.

The use cases write down what they accept, refuse and end. Here is what never reached them.
"""

from __future__ import annotations

import re

from starlette.requests import Request

from app.auth.principal import Principal
from app.auth.sessions.errors import (
    CrossSiteRefused,
    LoginFailed,
    LoginForbidden,
    LoginRefused,
    LogoutTokenRefused,
)
from app.auth.tokens.errors import PermissionDenied, TokenRefused
from app.clock import Clock
from app.domain.errors import ChadburnError, Unavailable
from app.domain.operation import Actor, JsonObject
from app.domain.scopes import Scope
from app.http.bodies import ENGINE_ID
from app.http.refusals import RateLimited
from app.http.rooms import Rooms, rooms_of
from app.ledger.ledger import Ledger
from app.ledger.values import AuditEntry
from app.observability.log import logger
from app.observability.refused_callers import RefusedCallers
from app.operations.callers import Caller

_READING = frozenset({"GET", "HEAD"})
_ID = re.compile(ENGINE_ID)
_log = logger("chadburn.audit")


def actor_of(principal: Principal) -> Actor:
    return Actor(principal.issuer, principal.subject, principal.client_id)


def caller_of(request: Request, who: Principal, note: str | None = None) -> Caller:
    """Who is behind this request, for a use case to write down. From here on the audit is that
    use case's, also of a refusal."""
    ids = request.state.ids
    request.state.handed_over = True
    return Caller(
        actor=actor_of(who),
        note=note,
        request_id=ids.request_id,
        trace_id=ids.trace_id,
        source=request.state.source,
        scopes=_asked_of(request),
    )


async def record_read(request: Request, who: Principal, detail: JsonObject) -> None:
    """That the audit was read. Raises LedgerUnavailable: what can't be written isn't shown."""
    rooms = rooms_of(request)
    await rooms.ledger.audit.append(
        _entry(request, rooms.clock, actor_of(who), outcome="allowed", reason=None, detail=detail)
    )


async def record_refusal(request: Request, error: ChadburnError, *, folded: bool = False) -> None:
    """Write down a refusal of the edge; `folded`: only count it. Never raises: the caller's answer
    is the same."""
    rooms: Rooms | None = getattr(request.state, "rooms", None)
    if rooms is None:
        return
    actor = _actor(request, error)
    if _is_folded(error, known=actor is not None):
        rooms.metrics.caller_refused(error.reason)
        rooms.refused_callers.count(rooms.clock.now(), request.state.source, error.reason)
        return
    denied, limited = isinstance(error, PermissionDenied), isinstance(error, RateLimited)
    if denied or limited:
        rooms.metrics.caller_refused(error.reason)
    elif isinstance(error, LoginFailed):
        pass  # what comes to a login's end is a GET
    elif _is_read(request) or _is_handed_over(request) or isinstance(error, Unavailable):
        return
    if folded or limited:
        source = request.state.source
        rooms.refused_callers.count(rooms.clock.now(), source, error.reason, actor)
        return
    if actor is None and not isinstance(error, LoginFailed):
        # Nothing is there: no order to anybody. A stranger does not have rows written one by one.
        return
    outcome = "denied" if denied else "refused"
    entry = _entry(request, rooms.clock, actor, outcome=outcome, reason=error.reason, detail={})
    try:
        await rooms.ledger.audit.append(entry)
    except ChadburnError as failure:
        _log.error("audit_not_written", exc_info=failure, outcome=outcome, reason=error.reason)


async def record_refused_callers(
    ledger: Ledger, callers: RefusedCallers, clock: Clock, *, all_of_them: bool
) -> None:
    """Write the folded refusals: of the minutes that are over, or at the end all of them."""
    for calls in callers.take(None if all_of_them else clock.now()):
        entry = AuditEntry(
            at=calls.minute,
            action="authenticate" if calls.caller is None else "call",
            outcome="denied",
            actor=calls.caller,
            reason=max(calls.reasons, key=lambda reason: calls.reasons[reason]),
            source=calls.source,
            detail={"calls": sum(calls.reasons.values()), "reasons": dict(calls.reasons)},
        )
        try:
            await ledger.audit.append(entry)
        except ChadburnError as failure:
            _log.error("audit_not_written", exc_info=failure, outcome="denied")


def _is_folded(error: ChadburnError, *, known: bool) -> bool:
    """What anybody can bring about, as often as they like: it is counted, not written down."""
    if isinstance(error, LoginFailed):
        return False  # took a code that the issuer gave out
    if isinstance(error, CrossSiteRefused):
        return not known
    return isinstance(error, TokenRefused | LoginRefused | LogoutTokenRefused)


def _actor(request: Request, error: ChadburnError) -> Actor | None:
    """Who was refused, as far as that is known."""
    if isinstance(error, LoginForbidden):
        return actor_of(error.who)
    who: Principal | None = getattr(request.state, "principal", None)
    by_session: Actor | None = getattr(request.state, "actor", None)
    return by_session if who is None else actor_of(who)


def _is_read(request: Request) -> bool:
    return request.method in _READING


def _is_handed_over(request: Request) -> bool:
    return bool(getattr(request.state, "handed_over", False))


def _engine_named(request: Request) -> str | None:
    """The engine, or what the path calls one: who was refused before it was looked up may well have
    meant one that is there."""
    engine = getattr(request.state, "engine", None)
    if engine is not None:
        return str(engine.id)
    named = request.path_params.get("engine", "")
    return named if _ID.fullmatch(named) else None


def _entry(
    request: Request,
    clock: Clock,
    actor: Actor | None,
    *,
    outcome: str,
    reason: str | None,
    detail: JsonObject,
) -> AuditEntry:
    ids = request.state.ids
    operation = getattr(request.state, "operation", None)
    return AuditEntry(
        at=clock.now(),
        action=getattr(request.scope.get("route"), "name", "unmatched"),
        outcome=outcome,
        actor=actor,
        engine_id=_engine_named(request),
        operation_id=None if operation is None else operation.id,
        reason=reason,
        request_id=ids.request_id,
        trace_id=ids.trace_id,
        source=request.state.source,
        detail=detail,
        scopes=_asked_of(request),
    )


def _asked_of(request: Request) -> tuple[str, ...]:
    asked: tuple[Scope, ...] = getattr(request.state, "asked_scopes", ())
    return tuple(scope.value for scope in asked)
