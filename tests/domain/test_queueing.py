"""Who has the slot, who waits, and whose turn it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import EngineBusy, QueueFull
from app.domain.queueing import Line, Queueing

ids = st.text("abcdef", min_size=1, max_size=4)
lines = st.builds(Line, st.none() | ids, st.lists(ids, unique=True, max_size=5).map(tuple))
queueings = st.builds(Queueing, st.integers(1, 5), st.booleans())


def test_a_free_engine_takes_an_order_at_once() -> None:
    assert Line().enter(None) is None
    assert Line().enter(Queueing(1)) is None
    assert Line().first is None
    assert Line().next is None


def test_what_was_judged_as_one_that_waits_does_so_in_any_case() -> None:
    assert Line().enter(Queueing(1, in_any_case=True)) == 1


def test_behind_whatever_is_there() -> None:
    assert Line("a").enter(Queueing(2)) == 1
    assert Line("a", ("b",)).enter(Queueing(2)) == 2
    assert Line(None, ("b",)).enter(Queueing(2)) == 2


def test_no_more_than_may_wait() -> None:
    with pytest.raises(QueueFull) as full:
        Line("a", ("b", "c")).enter(Queueing(2))
    assert full.value.operation_id == "a"
    assert full.value.retryable


def test_who_does_not_wait_is_told_what_is_in_the_way() -> None:
    with pytest.raises(EngineBusy) as running:
        Line("a", ("b",)).enter(None)
    with pytest.raises(EngineBusy) as waiting:
        Line(None, ("b", "c")).enter(None)
    assert (running.value.operation_id, waiting.value.operation_id) == ("a", "b")
    assert running.value.message != waiting.value.message


def test_the_first_of_those_that_wait_is_next_once_the_slot_is_free() -> None:
    assert Line("a", ("b", "c")).next is None
    assert Line(None, ("b", "c")).next == "b"
    Line(None, ("b", "c")).check_turn("b")
    for line, before in ((Line(None, ("b", "c")), "b"), (Line("a", ("c",)), "a")):
        with pytest.raises(EngineBusy) as busy:
            line.check_turn("c")
        assert busy.value.operation_id == before


@given(lines, st.none() | queueings)
def test_nobody_overtakes_and_the_line_is_bounded(line: Line, queueing: Queueing | None) -> None:
    if queueing is None and line != Line():
        with pytest.raises(EngineBusy) as busy:
            line.enter(queueing)
        assert busy.value.operation_id == line.first
        return
    if queueing is not None and len(line.waiting) >= queueing.limit:
        with pytest.raises(QueueFull):
            line.enter(queueing)
        return
    place = line.enter(queueing)
    if place is None:
        assert line == Line()
        return
    assert queueing is not None
    assert place == len(line.waiting) + 1 <= queueing.limit
    joined = Line(line.holder, (*line.waiting, "new"))
    if place > 1 or line.holder is not None:
        with pytest.raises(EngineBusy):
            joined.check_turn("new")


@given(lines, ids)
def test_at_most_one_has_its_turn(line: Line, asks: str) -> None:
    if line.next == asks:
        line.check_turn(asks)
        assert line.holder is None
        assert line.waiting[0] == asks
    else:
        with pytest.raises(EngineBusy):
            line.check_turn(asks)
