"""That an explanation says what the gate would do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.auth.policy.explaining import Named, Verdict, explain
from app.auth.policy.rules import Policy, RefusedByPolicy
from app.auth.principal import Principal
from app.auth.tokens.errors import InsufficientScope
from app.domain.errors import UnknownEngine
from app.domain.scopes import Scope
from tests.auth.policies import callers, engines, policies, some

Engine = tuple[str, dict[str, str]]
needs = some(*Scope, max_size=2)


def judged(policy: Policy, caller: Principal, engine: Engine, needed: frozenset[Scope]) -> str:
    permit = policy.permit(caller)
    try:
        permit.require(*needed)
        permit.require_on(*engine, *needed)
    except (InsufficientScope, RefusedByPolicy, UnknownEngine) as refused:
        return refused.reason
    return ""


@given(policies, callers, engines, needs)
def test_with_all_that_is_to_be_known_it_says_what_happens(
    policy: Policy, caller: Principal, engine: Engine, needed: frozenset[Scope]
) -> None:
    said = explain(caller, policy, needed, Named(*engine))
    reason = judged(policy, caller, engine, needed)
    assert said.verdict is (Verdict.REFUSED if reason else Verdict.ALLOWED)
    if reason:
        assert said.reason == reason


@given(policies, callers, engines, needs, st.booleans(), st.booleans())
def test_with_less_it_never_says_what_does_not_happen(
    policy: Policy,
    caller: Principal,
    engine: Engine,
    needed: frozenset[Scope],
    with_id: bool,
    with_labels: bool,
) -> None:
    named = Named(engine[0] if with_id else None, engine[1] if with_labels else None)
    said = explain(caller, policy, needed, named).verdict
    if judged(policy, caller, engine, needed):
        assert said is not Verdict.ALLOWED
    else:
        assert said is not Verdict.REFUSED
