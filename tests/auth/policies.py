"""Callers, rules and engines for tests of policies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from app.auth.policy.rules import Policy, Rule, Who
from app.auth.principal import Principal
from app.domain.scopes import Scope
from app.domain.selectors import Selector

ISSUERS = ("https://a.test", "https://b.test")
ENGINE_IDS = ("e1", "e2", "e3")
NAMES, VALUES = ("team", "env"), ("x", "y", "")


def principal(*scopes: Scope, **changes: Any) -> Principal:
    values: dict[str, Any] = {
        "issuer": ISSUERS[0],
        "subject": "ada",
        "client_id": "console",
        "scopes": frozenset(scopes),
        "expires_at": datetime(2030, 1, 1, tzinfo=UTC),
    }
    return Principal(**values | changes)


def some(*of: Any, **size: Any) -> st.SearchStrategy[frozenset[Any]]:
    return st.frozensets(st.sampled_from(of), **size)


labels = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES))
_wanted = st.dictionaries(st.sampled_from(NAMES), some(*VALUES, min_size=1), max_size=2)
selectors = st.builds(
    Selector, ids=st.none() | some(*ENGINE_IDS, min_size=1), labels=_wanted, without=_wanted
)
callers = st.builds(
    lambda scopes, **who: principal(*scopes, **who),
    some(*Scope),
    issuer=st.sampled_from(ISSUERS),
    subject=st.sampled_from(("ada", "bob")),
    client_id=st.sampled_from(("console", "")),
    groups=some("ops", "dev"),
)
whos = st.builds(
    Who,
    issuers=st.none() | some(*ISSUERS, min_size=1),
    subjects=st.none() | some("ada", "bob", min_size=1),
    clients=st.none() | some("console", min_size=1),
    groups=st.none() | some("ops", "dev", min_size=1),
)
rules = st.builds(
    Rule, name=st.just("rule"), who=whos, scopes=st.none() | some(*Scope), engines=selectors
)
policies = st.builds(Policy, rules=st.lists(rules, max_size=4).map(tuple))
engines = st.tuples(st.sampled_from(ENGINE_IDS), labels)
