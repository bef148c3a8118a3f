"""Why a call would be allowed or refused, rule by rule. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from app.auth.policy.rules import Policy, Rule, Who
from app.auth.principal import Principal
from app.domain.scopes import Scope
from app.domain.selectors import Labels, Selector


class Takes(StrEnum):
    """Whether a rule is about the engine."""

    YES = "yes"
    NO = "no"
    PERHAPS = "perhaps"
    """That hangs on an id or labels that were not given."""


class Verdict(StrEnum):
    ALLOWED = "allowed"
    REFUSED = "refused"
    DEPENDS = "depends"


@dataclass(frozen=True, slots=True)
class Named:
    """The engine that a call is about. None: not given."""

    engine_id: str | None
    labels: Labels | None = None


@dataclass(frozen=True, slots=True)
class RuleFound:
    """`unmet`: what of the rule's `who` the caller is not. `leaves`: of the token's scopes."""

    rule: str
    unmet: tuple[str, ...]
    leaves: frozenset[Scope]
    engines: str
    takes: Takes


@dataclass(frozen=True, slots=True)
class Explained:
    """`lacks`: of the needed scopes, by the token; `left_out`: by the policy."""

    verdict: Verdict
    reason: str
    needed: tuple[Scope, ...]
    lacks: tuple[Scope, ...]
    left_out: tuple[Scope, ...]
    rules: tuple[RuleFound, ...]


_OWN = Rule(name="its own engines", who=Who(), scopes=None, engines=Selector())
"""Of a caller who has some by itself, where there is no policy."""


def explain(
    caller: Principal, policy: Policy | None, needed: Iterable[Scope], named: Named | None
) -> Explained:
    """`named` None: the call is about no one engine, and is answered with those in sight."""
    scopes = tuple(sorted(needed))
    if policy is None and not caller.engines.takes_all:
        policy = Policy(rules=(_OWN,))
    rules = () if policy is None else tuple(_found(rule, caller, named) for rule in policy.rules)
    lacks = tuple(scope for scope in scopes if scope not in caller.scopes)

    def answer(verdict: Verdict, reason: str, left_out: Iterable[Scope] = ()) -> Explained:
        return Explained(verdict, reason, scopes, lacks, tuple(sorted(left_out)), rules)

    if lacks or not caller.may_administer:
        return answer(Verdict.REFUSED, "INSUFFICIENT_SCOPE")
    if policy is None:
        return answer(Verdict.ALLOWED, "there is no policy: the token's scopes hold everywhere")
    anywhere = _left(rules, tuple(Takes))
    if not anywhere or not anywhere.issuperset(scopes):
        return answer(Verdict.REFUSED, "REFUSED_BY_POLICY", set(scopes) - anywhere)
    surely, perhaps = _left(rules, (Takes.YES,)), _left(rules, (Takes.YES, Takes.PERHAPS))
    if not perhaps:
        return answer(Verdict.REFUSED, "ENGINE_NOT_FOUND", scopes)
    if not perhaps.issuperset(scopes):
        return answer(Verdict.REFUSED, "REFUSED_BY_POLICY", set(scopes) - perhaps)
    if not surely or not surely.issuperset(scopes):
        return answer(Verdict.DEPENDS, "on which engine it is, and its labels")
    return answer(Verdict.ALLOWED, "a rule leaves each scope")


def _found(rule: Rule, caller: Principal, named: Named | None) -> RuleFound:
    engines = rule.engines.within(caller.engines)
    return RuleFound(
        rule.name,
        rule.who.unmet(caller),
        rule.leaves(caller),
        engines.in_words(),
        _takes(engines, named),
    )


def _takes(selector: Selector, named: Named | None) -> Takes:
    if named is None:
        return Takes.YES
    hangs = False
    if selector.ids is not None:
        if named.engine_id is None:
            hangs = True
        elif named.engine_id not in selector.ids:
            return Takes.NO
    by_label = replace(selector, ids=None)
    if named.labels is None:
        hangs = hangs or not by_label.takes_all
    elif not by_label.takes("", named.labels):
        return Takes.NO
    return Takes.PERHAPS if hangs else Takes.YES


def _left(rules: Iterable[RuleFound], takes: tuple[Takes, ...]) -> frozenset[Scope]:
    met = (found.leaves for found in rules if not found.unmet and found.takes in takes)
    return frozenset[Scope]().union(*met)
