"""The gate's rules, without any waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.kinds import Admission, NewRequests
from app.enginekit.gate import Gate, NewRequestRule, Passage

HOLD = NewRequestRule(NewRequests.HOLD, 1000)
REFUSE = NewRequestRule(NewRequests.REFUSE, 1000)


def admission(gate: Gate) -> Admission:
    """Read anew: a property changes behind the back of whoever has compared it once."""
    return gate.admission


def test_an_open_gate_lets_everybody_in_once() -> None:
    gate = Gate(max_held=1)
    assert gate.arrive("a") is Passage.ADMITTED
    assert gate.arrive("a") is Passage.DUPLICATE
    gate.leave("a")
    assert gate.arrive("a") is Passage.ADMITTED
    assert gate.in_flight == 1


def test_a_drain_holds_new_requests_and_counts_the_old_ones() -> None:
    gate = Gate(max_held=2)
    gate.arrive("old")
    gate.drain(HOLD)
    assert admission(gate) is Admission.DRAINING
    assert [gate.arrive(name) for name in ("a", "b", "c")] == [
        Passage.HELD,
        Passage.HELD,
        Passage.FULL,
    ]
    assert gate.arrive("b") is Passage.DUPLICATE
    assert gate.in_flight == 1
    gate.leave("old")
    assert gate.take_effect() == ()
    assert admission(gate) is Admission.PAUSED
    assert gate.open() == ("a", "b")
    assert gate.in_flight == 2


def test_a_drain_that_refuses_does_so_from_its_start() -> None:
    gate = Gate(max_held=2)
    gate.drain(REFUSE)
    assert gate.arrive("a") is Passage.REFUSED


def test_a_closing_gate_holds_until_it_is_known_whether_the_pause_takes_effect() -> None:
    gate = Gate(max_held=2)
    gate.close(REFUSE)
    assert admission(gate) is Admission.OPEN
    assert gate.arrive("a") is Passage.HELD
    assert gate.take_effect() == ("a",)
    assert gate.arrive("b") is Passage.REFUSED
    assert gate.held == 0


def test_a_pause_that_does_not_happen_returns_to_what_was_before() -> None:
    gate = Gate(max_held=2)
    gate.drain(HOLD)
    gate.arrive("a")
    assert gate.withdraw() == ("a",)
    assert admission(gate) is Admission.OPEN

    gate.close(HOLD)
    gate.take_effect()
    gate.arrive("b")
    gate.close(REFUSE)
    assert gate.arrive("c") is Passage.HELD  # the pause in force still says so
    assert gate.withdraw() == ()
    assert admission(gate) is Admission.PAUSED
    assert gate.held_ids() == ("b", "c")


def test_nothing_takes_effect_that_is_not_on_its_way() -> None:
    with pytest.raises(ValueError, match="no pause"):
        Gate(max_held=1).take_effect()


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "leave", "drain", "close", "take_effect", "withdraw", "open"]),
        st.sampled_from("abcde"),
        st.sampled_from([HOLD, REFUSE]),
    ),
    max_size=40,
)


@given(_STEPS)
def test_nobody_is_lost_and_nobody_is_in_two_places(
    steps: list[tuple[str, str, NewRequestRule]],
) -> None:
    gate = Gate(max_held=3)
    inside: set[str] = set()
    waiting: list[str] = []
    coming = False
    for step, name, rule in steps:
        if step == "arrive":
            passage = gate.arrive(name)
            assert (passage is Passage.DUPLICATE) == (name in inside or name in waiting)
            if passage is Passage.ADMITTED:
                assert admission(gate) is Admission.OPEN
                assert not coming
                inside.add(name)
            elif passage is Passage.HELD:
                waiting.append(name)
        elif step == "leave":
            gate.leave(name)
            inside.discard(name)
            if name in waiting:
                waiting.remove(name)
        elif step == "drain" and gate.admission is Admission.OPEN and not coming:
            gate.drain(rule)
            coming = True
        elif step == "close" and not coming:
            gate.close(rule)
            coming = True
        elif step == "take_effect" and coming:
            coming = False
            turned_back = gate.take_effect()
            assert turned_back in ((), tuple(waiting))
            if turned_back:
                waiting.clear()
            assert admission(gate) is Admission.PAUSED
        elif step in ("withdraw", "open") and (step == "withdraw") == coming:
            coming = False
            let_in = gate.withdraw() if step == "withdraw" else gate.open()
            assert let_in in ((), tuple(waiting))
            if gate.admission is Admission.OPEN:
                assert let_in == tuple(waiting)
                inside.update(waiting)
                waiting.clear()
        assert (gate.in_flight, gate.held_ids()) == (len(inside), tuple(waiting))
        assert gate.held <= 3
