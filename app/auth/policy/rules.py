"""The rules, and what they leave of a token. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from app.auth.principal import Principal
from app.auth.tokens.errors import PermissionDenied
from app.domain.errors import UnknownEngine
from app.domain.kinds import OperationKind
from app.domain.scopes import Scope
from app.domain.selectors import EVERYTHING, Labels, Selector, Sight


class RefusedByPolicy(PermissionDenied):
    """The token would do. No challenge: another token of the same caller would do no better."""

    reason = "REFUSED_BY_POLICY"

    @classmethod
    def for_want_of(cls, missing: Iterable[Scope], where: str = "") -> RefusedByPolicy:
        scopes = sorted(missing)
        word = "scope" if len(scopes) == 1 else "scopes"
        left = f"the {word} {' and '.join(scopes)}" if scopes else "any scope"
        return cls(f"The gateway's policy does not leave you {left}{where}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """Callers who meet all of it. None: whatever it is. `groups`: one of them is enough."""

    issuers: frozenset[str] | None = None
    subjects: frozenset[str] | None = None
    clients: frozenset[str] | None = None
    groups: frozenset[str] | None = None

    def unmet(self, caller: Principal) -> tuple[str, ...]:
        """What of it the caller does not meet, by the names that the file has."""
        checks = (
            ("issuer", self.issuers is None or caller.issuer in self.issuers),
            ("subject", self.subjects is None or caller.subject in self.subjects),
            ("client", self.clients is None or caller.client_id in self.clients),
            ("group", self.groups is None or not self.groups.isdisjoint(caller.groups)),
        )
        return tuple(name for name, met in checks if not met)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`scopes` None: those that the token grants, whichever they are."""

    name: str
    who: Who
    scopes: frozenset[Scope] | None
    engines: Selector

    def leaves(self, caller: Principal) -> frozenset[Scope]:
        """Of the token's scopes, on the rule's engines. Never more than the token has."""
        return caller.scopes if self.scopes is None else caller.scopes & self.scopes


@dataclass(frozen=True, slots=True)
class Grant:
    """What one rule leaves to one caller."""

    rule: str
    scopes: frozenset[Scope]
    engines: Selector


@dataclass(frozen=True, slots=True)
class Permit:
    """What one caller may do. `grants` None: there is no policy, so what the token says holds on
    every engine."""

    caller: Principal
    grants: tuple[Grant, ...] | None = None

    @property
    def unlimited(self) -> bool:
        """Whether engines make no difference to what the caller may do."""
        return self.grants is None

    def within(self, engines: Selector) -> Permit:
        """The same on those engines alone."""
        if engines.takes_all:
            return self
        grants = self.grants
        if grants is None:
            grants = (Grant("", self.caller.scopes, Selector()),)
        return Permit(
            self.caller,
            tuple(replace(grant, engines=grant.engines.within(engines)) for grant in grants),
        )

    def scopes(self) -> frozenset[Scope]:
        """Those that are left on some engine, there or not."""
        if self.grants is None:
            return self.caller.scopes
        return frozenset().union(*(grant.scopes for grant in self.grants))

    def scopes_on(self, engine_id: str, labels: Labels) -> frozenset[Scope]:
        if self.grants is None:
            return self.caller.scopes
        return frozenset().union(
            *(grant.scopes for grant in self.grants if grant.engines.takes(engine_id, labels))
        )

    def sight(self, scope: Scope) -> Sight:
        """The engines on which the caller has `scope`."""
        if self.grants is None:
            return EVERYTHING if scope in self.caller.scopes else Sight(())
        return Sight.of(grant.engines for grant in self.grants if scope in grant.scopes)

    def require(self, *scopes: Scope) -> None:
        """Before any engine is looked at: each of `scopes` has to be left somewhere; with none
        named, any scope.

        Raises InsufficientScope where the token lacks one, and RefusedByPolicy.
        """
        self.caller.require(*scopes)
        left = self.scopes()
        if not left or not left.issuperset(scopes):
            raise RefusedByPolicy.for_want_of(frozenset(scopes) - left)

    def require_on(self, engine_id: str, labels: Labels, *scopes: Scope) -> None:
        """All of `scopes`, on that engine. Raises UnknownEngine where the caller has no scope on
        it, so that it is as if it were not there; and as `require`."""
        self.caller.require(*scopes)
        left = self.scopes_on(engine_id, labels)
        if not left:
            raise UnknownEngine("there is no engine of that id")
        if not left.issuperset(scopes):
            raise RefusedByPolicy.for_want_of(frozenset(scopes) - left, " on this engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`require_reason`: orders that must say why. `clients_may_settle` None: as the settings say.
    Who meets no rule may do nothing."""

    rules: tuple[Rule, ...] = ()
    require_reason: frozenset[OperationKind] = frozenset()
    clients_may_settle: bool | None = None

    def permit(self, caller: Principal) -> Permit:
        """The union of what the rules leave that the caller meets."""
        met = (rule for rule in self.rules if not rule.who.unmet(caller))
        grants = tuple(Grant(rule.name, rule.leaves(caller), rule.engines) for rule in met)
        return Permit(caller, tuple(grant for grant in grants if grant.scopes))
