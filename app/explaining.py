"""What the gateway would say to a call, without a gateway: from its own route table, settings and
policy, by the code that judges there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2

from app.auth.policy.explaining import Explained, Named, Verdict, explain
from app.auth.policy.rules import Policy
from app.auth.principal import Principal
from app.auth.requires import Need, refused_besides
from app.auth.tokens.claims import Voucher, judge
from app.auth.tokens.errors import ClaimInvalid, ClaimMissing, IssuerForeign
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.nonces import Nonces
from app.auth.tokens.verifier import TokenVerifier
from app.clock import Clock
from app.domain.kinds import OperationKind
from app.domain.scopes import Scope
from app.http.api import OF_THE_KIND, found_route
from app.http.route import RouteFound
from app.settings import Settings
from app.startup import identities_of, issuers_of, policy_of

_TIMEOUT_S = 5.0
_REGISTERING = "register_engine"
_PAUSES_AND_FLUSHES = "/compat/vllm/{engine}/pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`path` as in a request, without a query. `engine_id`: of the operation, or the new engine,
    where the path does not name it; `labels` None: not known. `kind`: of the operation."""

    method: str
    path: str
    engine_id: str | None = None
    labels: dict[str, str] | None = None
    kind: OperationKind | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """`route` None: there is nothing at the path for that method. `explained` None: the route is
    open to all. `flushing`: of a pause that flushes as well, what that takes besides."""

    route: RouteFound | None
    explained: Explained | None
    flushing: Explained | None = None


def _named(route: RouteFound, question: Question) -> Named | None:
    if "engine" in route.params:
        return Named(route.params["engine"], question.labels)
    if "operation" in route.params or route.name == _REGISTERING:
        return Named(question.engine_id, question.labels)
    return None


class _NoProofs:
    """None is shown here."""

    async def first_use(self, digest: str, until: datetime) -> bool:
        raise AssertionError(digest, until)


async def caller_of_token(settings: Settings, token: str, clock: Clock) -> Principal:
    """As the gateway would verify it, now; one bound to a key as if a good proof had come
    with it. Asks the issuer, as a gateway does. Raises what `TokenVerifier.still_good` does,
    and StartupRefused."""
    issuers = issuers_of(settings)
    async with httpx2.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False) as http:
        nonces = Nonces(b"", clock.now)
        verifier = TokenVerifier(
            issuers, http=http, now=clock.now, proofs=_NoProofs(), nonces=nonces
        )
        try:
            return await verifier.still_good(token)
        finally:
            await verifier.aclose()


def caller_of_claims(settings: Settings, claims: dict[str, Any], clock: Clock) -> Principal:
    """Of an access token with these claims and a good signature. Asks nobody. Raises what `judge`
    does, and StartupRefused."""
    if "iss" not in claims:
        raise ClaimMissing("iss")
    issuer = claims["iss"]
    if not isinstance(issuer, str):
        raise ClaimInvalid("iss")
    configs: dict[str, IssuerConfig] = {one.issuer: one for one in issuers_of(settings)}
    if issuer not in configs:
        raise IssuerForeign
    return judge(configs[issuer], Voucher(typ="at+jwt"), claims, clock.now()).principal


def caller_of_identity(settings: Settings, name: str, clock: Clock) -> Principal | None:
    """As it is known at compatible endpoints; None: no identity is called so. Raises
    StartupRefused."""
    found = {one.name: one for one in identities_of(settings)}
    return found[name].principal(clock.now()) if name in found else None


def policy_in(settings: Settings, file: Path | None) -> Policy | None:
    """Of the file, or of the one that the settings name. Raises StartupRefused."""
    if file is not None:
        settings = settings.model_copy(update={"policy_file": file})
    return policy_of(settings, issuers_of(settings)).policy


def answer_to(
    question: Question, caller: Principal, policy: Policy | None, settings: Settings
) -> Answer:
    compat = frozenset(one.layer for one in settings.compat)
    route = found_route(question.method, question.path, compat=compat)
    if route is None or route.need is None:
        return Answer(route, None)
    need = route.need
    if route.name in OF_THE_KIND and question.kind is not None:
        need = Need((*need.scopes, question.kind.scope), need.person)
    found = explain(caller, policy, need.scopes, _named(route, question))
    if route.name in OF_THE_KIND and question.kind is None and found.verdict is Verdict.ALLOWED:
        found = replace(found, verdict=Verdict.DEPENDS, reason="on the operation's kind")
    clients_too = settings.clients_may_settle
    if policy is not None and policy.clients_may_settle is not None:
        clients_too = policy.clients_may_settle
    refusal = refused_besides(need, caller, read_only=settings.read_only, clients_too=clients_too)
    if found.verdict is not Verdict.REFUSED and refusal is not None:
        found = replace(found, verdict=Verdict.REFUSED, reason=refusal.reason)
    flushing = None
    if route.template == _PAUSES_AND_FLUSHES:
        flushing = explain(caller, policy, (Scope.CACHE,), _named(route, question))
    return Answer(route, found, flushing)
