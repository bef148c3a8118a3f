"""Which engines a selector takes, held against what it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.selectors import (
    EVERYTHING,
    Selector,
    Sight,
    is_engine_id,
    is_label_name,
    is_label_value,
)

names = st.sampled_from(["env", "team", "role"])
values = st.sampled_from(["prod", "test", "rl"])
labels = st.dictionaries(names, values)
wanted = st.dictionaries(names, st.frozensets(values, min_size=1))
ids = st.sampled_from(["e1", "e2", "e3"])
selectors = st.builds(
    Selector, ids=st.none() | st.frozensets(ids), labels=wanted, without=wanted
)  # fmt: skip


@given(selectors, ids, labels)
def test_each_part_has_to_be_met(selector: Selector, engine: str, has: dict[str, str]) -> None:
    named = selector.ids is None or engine in selector.ids
    with_all = all(has.get(name) in values for name, values in selector.labels.items())
    with_none = all(has.get(name) not in values for name, values in selector.without.items())
    assert selector.takes(engine, has) == (named and with_all and with_none)


@given(selectors, ids, labels)
def test_what_takes_all_takes_any(selector: Selector, engine: str, has: dict[str, str]) -> None:
    if selector.takes_all:
        assert selector.takes(engine, has)


@given(st.lists(selectors, max_size=4), ids, labels)
def test_a_sight_is_of_what_one_of_them_takes(
    some: list[Selector], engine: str, has: dict[str, str]
) -> None:
    sight = Sight.of(some)
    assert sight.sees(engine, has) == any(one.takes(engine, has) for one in some)
    assert sight.unlimited == any(one.takes_all for one in some)


@given(selectors, selectors, ids, labels)
def test_within_another_is_what_both_take(
    one: Selector, other: Selector, engine: str, has: dict[str, str]
) -> None:
    both = one.within(other)
    assert both.takes(engine, has) == (one.takes(engine, has) and other.takes(engine, has))
    assert both.takes_all == (one.takes_all and other.takes_all)


def test_without_limits_all_is_seen() -> None:
    assert EVERYTHING.unlimited
    assert EVERYTHING.sees("e1", {})
    assert not Sight.of([]).sees("e1", {})


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        (Selector(), "all engines"),
        (Selector(ids=frozenset({"b", "a"})), "id 'a' or 'b'"),
        (
            Selector(labels={"env": frozenset({"rl"})}, without={"team": frozenset({"x"})}),
            "env = 'rl' and not team = 'x'",
        ),
    ],
)
def test_in_words(selector: Selector, words: str) -> None:
    assert selector.in_words() == words


def test_what_names_and_values_look_like() -> None:
    assert is_engine_id("decode-1")
    assert not is_engine_id("-decode")
    assert not is_engine_id("Decode")
    assert is_label_name("topology.io/zone")
    assert not is_label_name("zone/")
    assert is_label_value("")
    assert not is_label_value("é")
