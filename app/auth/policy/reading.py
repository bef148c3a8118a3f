"""From the text of a policy file to a policy, or to every fault in it with its place.

    clients_may_settle = false
    require_reason = ["pause", "update_weights"]

    [[rules]]
    name = "the search team's own engines"
    who = { issuer = "https://id.example", group = "search" }
    scopes = ["admin:read", "admin:pause"]
    engines = { labels = { team = "search", env = ["dev", "test"] } }

A file with one fault is no policy at all: rules that were meant to narrow would be missing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.auth.policy.rules import Policy, Rule, Who
from app.domain.kinds import OperationKind
from app.domain.scopes import Scope
from app.domain.selectors import Selector, is_engine_id, is_label_name, is_label_value

MAX_BYTES = 1 << 20
_MOST_FAULTS = 100
_SCOPES = {scope.value: scope for scope in Scope}
_KINDS = {kind.value: kind for kind in OperationKind}
ANYONE, AS_GRANTED, ALL = "anyone", "as_granted", "all"


@dataclass(frozen=True, slots=True)
class Fault:
    """`place`: as TOML would name it, `rules[2].who.issuer`; rules count from 1."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


class PolicyRefused(Exception):
    """The whole file. `faults`: all of them, in the order of the file's fields."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(map(str, self.faults)))


def read_policy(content: bytes, issuers: Mapping[str, bool] | None = None) -> Policy:
    """`issuers`: those that are trusted, and whether their settings name group claims; None: not
    known, so what rules say of issuers is not held against them.

    Raises PolicyRefused.
    """
    if len(content) > MAX_BYTES:
        raise PolicyRefused([Fault("file", f"is larger than {MAX_BYTES} bytes")])
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise PolicyRefused([Fault("file", "is not UTF-8")]) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyRefused([Fault("file", f"is not TOML: {error}")]) from None
    reading = _Reading(issuers)
    policy = reading.policy(document)
    if reading.faults:
        raise PolicyRefused(reading.faults[:_MOST_FAULTS])
    return policy


def read_engines(value: Any, place: str = "engines") -> Selector:
    """Which engines, as a rule says it. Raises PolicyRefused."""
    reading = _Reading(None)
    selector = reading.engines(place, value)
    if reading.faults:
        raise PolicyRefused(reading.faults)
    return selector


class _Reading:
    """Goes on after a fault, to find the others."""

    def __init__(self, issuers: Mapping[str, bool] | None) -> None:
        self._issuers = issuers
        self.faults: list[Fault] = []

    def policy(self, document: Mapping[str, Any]) -> Policy:
        self._known("", document, {"rules", "require_reason", "clients_may_settle"})
        settle = document.get("clients_may_settle")
        if settle is not None and not isinstance(settle, bool):
            self._fault("clients_may_settle", "is true or false")
            settle = None
        rules = document.get("rules", [])
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            self._fault("rules", "is written [[rules]], once for each rule")
            rules = []
        if not rules:
            self._fault("rules", "there are none, so nobody could do anything")
        read = [self._rule(f"rules[{n}]", rule) for n, rule in enumerate(rules, 1)]
        seen: set[str] = set()
        for number, rule in enumerate(read, 1):
            if rule.name and rule.name in seen:
                self._fault(f"rules[{number}].name", f"{rule.name!r} names another rule already")
            seen.add(rule.name)
        return Policy(
            rules=tuple(read),
            require_reason=self._reasons(document.get("require_reason", [])),
            clients_may_settle=settle,
        )

    def _reasons(self, value: Any) -> frozenset[OperationKind]:
        if value == ALL:
            return frozenset(OperationKind)
        if value == []:
            return frozenset()
        names = self._strings("require_reason", value, lambda name: name in _KINDS, _no_kind)
        return frozenset(_KINDS[name] for name in names)

    def _rule(self, place: str, rule: Mapping[str, Any]) -> Rule:
        self._known(place, rule, {"name", "who", "scopes", "engines"})
        name = rule.get("name")
        if not isinstance(name, str) or not 1 <= len(name) <= 100 or not name.isprintable():
            self._fault(f"{place}.name", "is needed: 1 to 100 printable characters")
            name = ""
        return Rule(
            name=name,
            who=self._who(f"{place}.who", rule.get("who")),
            scopes=self._scopes(f"{place}.scopes", rule.get("scopes")),
            engines=self.engines(f"{place}.engines", rule.get("engines")),
        )

    def _who(self, place: str, who: Any) -> Who:
        if who == ANYONE:
            return Who()
        if not isinstance(who, dict) or not who:
            self._fault(place, f'is needed: "{ANYONE}", or issuer with subject, client, group')
            return Who()
        self._known(place, who, {"issuer", "subject", "client", "group"})
        if "issuer" not in who:
            # Another issuer may have somebody else of the same name.
            self._fault(f"{place}.issuer", "is needed: names mean something with their issuer only")

        def named(field: str) -> frozenset[str] | None:
            if field not in who:
                return None
            return self._strings(f"{place}.{field}", who[field], _is_name, _no_name)

        found = Who(
            issuers=named("issuer"),
            subjects=named("subject"),
            clients=named("client"),
            groups=named("group"),
        )
        self._check_issuers(place, found)
        return found

    def _check_issuers(self, place: str, who: Who) -> None:
        if self._issuers is None or who.issuers is None:
            return
        for issuer in sorted(who.issuers):
            if issuer not in self._issuers:
                self._fault(f"{place}.issuer", f"{issuer!r} is no issuer of the settings")
            elif who.groups is not None and not self._issuers[issuer]:
                what = f"{issuer!r} has no group_claims in the settings"
                self._fault(f"{place}.group", what)

    def _scopes(self, place: str, value: Any) -> frozenset[Scope] | None:
        if value == AS_GRANTED:
            return None
        names = self._strings(place, value, lambda name: name in _SCOPES, _no_scope)
        return frozenset(_SCOPES[name] for name in names)

    def engines(self, place: str, value: Any) -> Selector:
        if value == ALL:
            return Selector()
        if not isinstance(value, dict) or not value:
            self._fault(place, f'is needed: "{ALL}", or some of id, labels and without')
            return Selector()
        self._known(place, value, {"id", "labels", "without"})
        ids = None
        if "id" in value:
            ids = self._strings(f"{place}.id", value["id"], is_engine_id, _no_id)
        return Selector(
            ids=ids,
            labels=self._labels(f"{place}.labels", value.get("labels")),
            without=self._labels(f"{place}.without", value.get("without")),
        )

    def _labels(self, place: str, value: Any) -> dict[str, frozenset[str]]:
        if value is None:
            return {}
        if not isinstance(value, dict) or not value:
            self._fault(place, "is a table of label names, each with a value or a list of them")
            return {}
        for name in value:
            if not is_label_name(name):
                self._fault(place, f"{name!r} can't be the name of a label")
        return {
            name: self._strings(f"{place}.{name}", values, is_label_value, _no_value)
            for name, values in value.items()
        }

    def _strings(
        self,
        place: str,
        value: Any,
        good: Callable[[str], bool],
        say: Callable[[str], str],
    ) -> frozenset[str]:
        """A string or a list of them, each of which is good."""
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values:
            self._fault(place, "is needed: a string, or a list of some")
            return frozenset()
        found = set()
        for number, item in enumerate(values, 1):
            at = place if isinstance(value, str) else f"{place}[{number}]"
            if not isinstance(item, str):
                self._fault(at, "is no string")
            elif not good(item):
                self._fault(at, say(item))
            else:
                found.add(item)
        return frozenset(found)

    def _known(self, place: str, table: Mapping[str, Any], names: set[str]) -> None:
        for key in table:
            if key not in names:
                at = f"{place}.{key}" if place else key
                self._fault(at, f"unknown key; known here: {', '.join(sorted(names))}")

    def _fault(self, place: str, what: str) -> None:
        self.faults.append(Fault(place, what))


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= 255 and text.isprintable()


def _no_name(text: str) -> str:
    del text
    return "has 1 to 255 printable characters"


def _no_kind(text: str) -> str:
    return f"{text!r} is no kind of order"


def _no_scope(text: str) -> str:
    return f"{text!r} is no scope; there are no wildcards"


def _no_id(text: str) -> str:
    return f"{text!r} can't be the id of an engine"


def _no_value(text: str) -> str:
    return f"{text!r} can't be the value of a label"
