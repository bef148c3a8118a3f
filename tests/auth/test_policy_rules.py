"""What a policy leaves of a token, for any policy, caller and engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from app.auth.policy.rules import Grant, Permit, Policy, RefusedByPolicy, Rule, Who
from app.auth.principal import AudienceKind, Principal
from app.auth.tokens.errors import InsufficientScope
from app.domain.errors import UnknownEngine
from app.domain.scopes import Scope
from app.domain.selectors import EVERYTHING, Selector, Sight
from tests.auth.policies import callers, engines, policies, principal, rules, selectors

Engine = tuple[str, dict[str, str]]


@given(policies, callers, engines)
def test_a_policy_never_adds(policy: Policy, caller: Principal, engine: Engine) -> None:
    permit = policy.permit(caller)
    assert permit.scopes_on(*engine) <= permit.scopes() <= caller.scopes


@given(policies, callers, engines)
def test_it_leaves_the_union_of_what_its_rules_leave(
    policy: Policy, caller: Principal, engine: Engine
) -> None:
    alone = [Policy(rules=(rule,)).permit(caller).scopes_on(*engine) for rule in policy.rules]
    assert policy.permit(caller).scopes_on(*engine) == frozenset().union(*alone)


@given(policies, callers, engines)
def test_the_order_of_rules_says_nothing(policy: Policy, caller: Principal, engine: Engine) -> None:
    turned = replace(policy, rules=policy.rules[::-1])
    assert turned.permit(caller).scopes_on(*engine) == policy.permit(caller).scopes_on(*engine)


@given(policies, rules, callers, engines)
def test_another_rule_takes_nothing_away(
    policy: Policy, rule: Rule, caller: Principal, engine: Engine
) -> None:
    more = replace(policy, rules=(*policy.rules, rule))
    assert more.permit(caller).scopes_on(*engine) >= policy.permit(caller).scopes_on(*engine)


@given(rules, callers, engines)
def test_a_rule_is_about_its_own_callers_and_engines_alone(
    rule: Rule, caller: Principal, engine: Engine
) -> None:
    left = Policy(rules=(rule,)).permit(caller).scopes_on(*engine)
    if rule.who.unmet(caller) or not rule.engines.takes(*engine):
        assert left == frozenset()
    else:
        assert left == (caller.scopes if rule.scopes is None else caller.scopes & rule.scopes)


@given(policies, callers, engines)
def test_what_is_seen_is_where_the_scope_is_left(
    policy: Policy, caller: Principal, engine: Engine
) -> None:
    permit = policy.permit(caller)
    for scope in Scope:
        assert permit.sight(scope).sees(*engine) == (scope in permit.scopes_on(*engine))


@given(policies, callers, engines)
def test_more_groups_and_more_scopes_never_mean_less(
    policy: Policy, caller: Principal, engine: Engine
) -> None:
    larger = replace(caller, groups=frozenset({"ops", "dev"}), scopes=frozenset(Scope))
    left = policy.permit(caller).scopes_on(*engine)
    assert policy.permit(larger).scopes_on(*engine) >= left


@given(callers, engines)
def test_without_a_policy_the_token_holds_everywhere(caller: Principal, engine: Engine) -> None:
    permit = Permit(caller)
    assert permit.unlimited
    assert permit.scopes_on(*engine) == permit.scopes() == caller.scopes
    for scope in Scope:
        assert permit.sight(scope) == (EVERYTHING if scope in caller.scopes else Sight(()))


@given(callers)
def test_who_meets_no_rule_may_do_nothing(caller: Principal) -> None:
    permit = Policy().permit(caller)
    assert not permit.unlimited
    for scope in caller.scopes:
        with pytest.raises(RefusedByPolicy):
            permit.require(scope)
    with pytest.raises((RefusedByPolicy, InsufficientScope)):
        permit.require()


@given(selectors, engines)
def test_a_selector_of_everything_is_no_limit(selector: Selector, engine: Engine) -> None:
    assert Sight.of([selector, Selector()]).unlimited
    assert Sight.of([selector]).sees(*engine) == selector.takes(*engine)
    assert Sight.of([]).selectors == ()


DEV = Selector(labels={"env": frozenset({"dev"})})
PROD = Selector(labels={"env": frozenset({"prod"})})
POLICY = Policy(
    rules=(
        Rule(name="all", who=Who(), scopes=frozenset({Scope.READ}), engines=Selector()),
        Rule(name="dev", who=Who(), scopes=frozenset({Scope.PAUSE}), engines=DEV),
        Rule(name="aborts", who=Who(), scopes=frozenset({Scope.ABORT}), engines=PROD),
    )
)


def test_the_token_is_asked_first_then_the_policy() -> None:
    permit = POLICY.permit(principal(Scope.READ, Scope.SHUTDOWN))
    permit.require(Scope.READ)
    with pytest.raises(InsufficientScope):
        permit.require(Scope.PAUSE)  # a rule would leave it, and the token has it not
    with pytest.raises(RefusedByPolicy, match=r"admin:shutdown\.$"):
        permit.require(Scope.SHUTDOWN)
    with pytest.raises(RefusedByPolicy, match="leave you the scope admin:shutdown on this engine"):
        permit.require_on("e1", {}, Scope.SHUTDOWN)


def test_all_scopes_have_to_be_left_on_the_same_engine() -> None:
    permit = POLICY.permit(principal(*Scope))
    permit.require(Scope.PAUSE, Scope.ABORT)  # somewhere each
    for env, lacks in (("dev", "abort"), ("prod", "pause")):
        with pytest.raises(RefusedByPolicy, match=lacks):
            permit.require_on("e1", {"env": env}, Scope.PAUSE, Scope.ABORT)


def test_an_engine_without_any_scope_is_not_there() -> None:
    narrow = replace(POLICY, rules=POLICY.rules[1:])
    permit = narrow.permit(principal(Scope.PAUSE))
    permit.require_on("e1", {"env": "dev"}, Scope.PAUSE)
    for labels in ({}, {"env": "prod"}, {"env": "DEV"}):
        with pytest.raises(UnknownEngine):
            permit.require_on("e1", labels, Scope.PAUSE)


def test_an_inference_token_stays_one_whatever_the_policy_says() -> None:
    caller = principal(audience=AudienceKind.INFERENCE)
    with pytest.raises(InsufficientScope):
        POLICY.permit(caller).require()


def test_what_a_caller_does_not_meet_is_named() -> None:
    who = Who(
        issuers=frozenset({"https://b.test"}),
        subjects=frozenset({"ada"}),
        groups=frozenset({"ops"}),
    )
    assert who.unmet(principal()) == ("issuer", "group")
    assert who.unmet(principal(issuer="https://b.test", groups=frozenset({"ops", "x"}))) == ()


def test_a_selector_in_words() -> None:
    assert Selector().in_words() == "all engines"
    chosen = Selector(
        ids=frozenset({"e2", "e1"}),
        labels={"env": frozenset({"dev"})},
        without={"tier": frozenset({"gold"})},
    )
    assert chosen.in_words() == "id 'e1' or 'e2' and env = 'dev' and not tier = 'gold'"


@pytest.mark.parametrize(
    ("missing", "where", "left"),
    [
        ((Scope.READ,), "", "the scope admin:read"),
        ((Scope.READ, Scope.PAUSE), " here", "the scopes admin:pause and admin:read here"),
        ((), "", "any scope"),
    ],
)
def test_which_scopes_are_wanted(missing: tuple[Scope, ...], where: str, left: str) -> None:
    refused = RefusedByPolicy.for_want_of(missing, where)
    assert refused.message == f"The gateway's policy does not leave you {left}."


@pytest.mark.parametrize("field", ["issuer", "subject", "client", "group"])
def test_each_thing_that_a_rule_asks_of_its_callers(field: str) -> None:
    caller = principal(groups=frozenset({"ops"}))
    right = {"issuer": caller.issuer, "subject": "ada", "client": "console", "group": "ops"}
    assert Who(**{f"{field}s": frozenset({right[field], "x"})}).unmet(caller) == ()
    assert Who(**{f"{field}s": frozenset({"x"})}).unmet(caller) == (field,)


def test_what_is_granted_by_which_rule_and_on_a_caller_s_own_engines_alone() -> None:
    caller = principal(Scope.READ, Scope.PAUSE)
    own = Selector(ids=frozenset({"e1"}))
    both = Selector(ids=own.ids, labels=DEV.labels)
    permit = POLICY.permit(caller)
    assert permit.grants == (
        Grant("all", frozenset({Scope.READ}), Selector()),
        Grant("dev", frozenset({Scope.PAUSE}), DEV),
    )
    assert permit.within(own).grants == (
        Grant("all", frozenset({Scope.READ}), own),
        Grant("dev", frozenset({Scope.PAUSE}), both),
    )
    assert permit.within(Selector()) is permit
    assert Permit(caller).within(own).grants == (Grant("", caller.scopes, own),)
    assert Permit(caller).within(Selector()).grants is None
