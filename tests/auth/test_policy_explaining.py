"""That an explanation says what the gate would do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth.policy.explaining import Explained, Named, RuleFound, Takes, Verdict, explain
from app.auth.policy.rules import Permit, Policy, RefusedByPolicy, Rule, Who
from app.auth.principal import AudienceKind, Principal
from app.auth.tokens.errors import InsufficientScope
from app.domain.errors import UnknownEngine
from app.domain.scopes import Scope
from app.domain.selectors import Selector
from tests.auth.policies import callers, engines, policies, principal, selectors, some

Engine = tuple[str, dict[str, str]]
needs = some(*Scope, max_size=2)
narrowed = st.builds(
    lambda caller, own: replace(caller, engines=own), callers, st.just(Selector()) | selectors
)
some_policies = st.none() | policies


def judged(
    policy: Policy | None, caller: Principal, engine: Engine, needed: frozenset[Scope]
) -> str:
    permit = Permit(caller) if policy is None else policy.permit(caller)
    permit = permit.within(caller.engines)
    try:
        permit.require(*needed)
        permit.require_on(*engine, *needed)
    except (InsufficientScope, RefusedByPolicy, UnknownEngine) as refused:
        return refused.reason
    return ""


@given(some_policies, narrowed, engines, needs)
def test_with_all_that_is_to_be_known_it_says_what_happens(
    policy: Policy | None, caller: Principal, engine: Engine, needed: frozenset[Scope]
) -> None:
    said = explain(caller, policy, needed, Named(*engine))
    reason = judged(policy, caller, engine, needed)
    assert said.verdict is (Verdict.REFUSED if reason else Verdict.ALLOWED)
    if reason:
        assert said.reason == reason


@given(some_policies, narrowed, engines, needs, st.booleans(), st.booleans())
def test_with_less_it_never_says_what_does_not_happen(
    policy: Policy | None,
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


READ, PAUSE, ABORT = Scope.READ, Scope.PAUSE, Scope.ABORT
DEV = Selector(ids=frozenset({"e1"}), labels={"env": frozenset({"dev"})})
POLICY = Policy(
    rules=(
        Rule(name="dev", who=Who(), scopes=frozenset({READ, PAUSE}), engines=DEV),
        Rule(name="bob", who=Who(subjects=frozenset({"bob"})), scopes=None, engines=Selector()),
    )
)
ELSEWHERE = "on which engine it is, and its labels"


@pytest.mark.parametrize(
    ("needed", "named", "verdict", "reason", "left_out", "takes"),
    [
        ((READ,), None, Verdict.ALLOWED, "a rule leaves each scope", (), Takes.YES),
        ((), None, Verdict.ALLOWED, "a rule leaves each scope", (), Takes.YES),
        ((ABORT,), None, Verdict.REFUSED, "REFUSED_BY_POLICY", (ABORT,), Takes.YES),
        (
            (ABORT, READ),
            Named("e1", {"env": "dev"}),
            Verdict.REFUSED,
            "REFUSED_BY_POLICY",
            (ABORT,),
            Takes.YES,
        ),
        (
            (PAUSE, READ),
            Named("e1", {"env": "dev"}),
            Verdict.ALLOWED,
            "a rule leaves each scope",
            (),
            Takes.YES,
        ),
        (
            (PAUSE, READ),
            Named("e2", {"env": "dev"}),
            Verdict.REFUSED,
            "ENGINE_NOT_FOUND",
            (PAUSE, READ),
            Takes.NO,
        ),
        ((READ,), Named("e2"), Verdict.REFUSED, "ENGINE_NOT_FOUND", (READ,), Takes.NO),
        ((READ,), Named("e1", {}), Verdict.REFUSED, "ENGINE_NOT_FOUND", (READ,), Takes.NO),
        ((READ,), Named(None, {}), Verdict.REFUSED, "ENGINE_NOT_FOUND", (READ,), Takes.NO),
        ((READ,), Named("e1"), Verdict.DEPENDS, ELSEWHERE, (), Takes.PERHAPS),
        ((), Named("e1"), Verdict.DEPENDS, ELSEWHERE, (), Takes.PERHAPS),
        ((READ,), Named(None, {"env": "dev"}), Verdict.DEPENDS, ELSEWHERE, (), Takes.PERHAPS),
        ((READ,), Named(None), Verdict.DEPENDS, ELSEWHERE, (), Takes.PERHAPS),
    ],
)
def test_what_it_says_of_each_rule_and_why(
    needed: tuple[Scope, ...],
    named: Named | None,
    verdict: Verdict,
    reason: str,
    left_out: tuple[Scope, ...],
    takes: Takes,
) -> None:
    found = explain(principal(READ, PAUSE, ABORT), POLICY, needed, named)
    dev = RuleFound("dev", (), frozenset({READ, PAUSE}), "id 'e1' and env = 'dev'", takes)
    every = frozenset({READ, PAUSE, ABORT})
    bob = RuleFound("bob", ("subject",), every, "all engines", Takes.YES)
    order = tuple(sorted(needed))
    assert found == Explained(verdict, reason, order, (), left_out, (dev, bob))


def test_a_scope_that_is_left_on_another_engine_is_left_out_on_this_one() -> None:
    rules = (
        *POLICY.rules,
        Rule(name="e2", who=Who(), scopes=None, engines=Selector(ids=frozenset({"e2"}))),
    )
    policy = Policy(rules=rules)
    caller = principal(READ, PAUSE, ABORT)
    found = explain(caller, policy, (READ, ABORT), Named("e1", {"env": "dev"}))
    assert (found.verdict, found.reason) == (Verdict.REFUSED, "REFUSED_BY_POLICY")
    assert found.left_out == (ABORT,)
    perhaps = explain(caller, policy, (READ, ABORT), Named(None, {"env": "dev"}))
    assert (perhaps.verdict, perhaps.left_out) == (Verdict.DEPENDS, ())
    surely = explain(caller, policy, (READ,), Named("e2", {}))
    assert surely.verdict is Verdict.ALLOWED


@pytest.mark.parametrize("policy", [None, POLICY])
def test_the_token_is_asked_first(policy: Policy | None) -> None:
    lacking = explain(principal(READ), policy, (PAUSE, READ, ABORT), None)
    assert (lacking.verdict, lacking.reason) == (Verdict.REFUSED, "INSUFFICIENT_SCOPE")
    assert (lacking.needed, lacking.lacks) == ((ABORT, PAUSE, READ), (ABORT, PAUSE))
    assert lacking.left_out == ()
    for nobody in (principal(), principal(READ, audience=AudienceKind.INFERENCE)):
        assert explain(nobody, policy, (), None).reason == "INSUFFICIENT_SCOPE"


def test_without_a_policy_the_scopes_hold_everywhere() -> None:
    found = explain(principal(READ), None, (READ,), Named("e1", {}))
    said = "there is no policy: the token's scopes hold everywhere"
    assert found == Explained(Verdict.ALLOWED, said, (READ,), (), (), ())
