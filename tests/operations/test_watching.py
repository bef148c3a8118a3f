"""When engines are read again."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.ledger.values import Watched
from app.operations.watching import Rounds, interval_of


def fleet(count: int, *busy: int) -> list[Watched]:
    return [Watched(f"e{number}", 1, None, number in busy) for number in range(count)]


def test_a_large_fleet_is_read_at_a_bounded_pace() -> None:
    assert interval_of(5.0, 2) == 5.0
    assert interval_of(5.0, 1_000) == 10.0
    assert interval_of(5.0, 10_000) == 12.0
    assert interval_of(60.0, 10_000) == 60.0


@given(st.sampled_from([0.02, 0.5, 5.0, 60.0]), st.integers(1, 40), st.floats(0.0, 3.0))
def test_each_is_read_at_once_and_then_once_in_its_time(
    wanted_s: float, count: int, late_s: float
) -> None:
    rounds, now, engines = Rounds(wanted_s), 1_000.0, fleet(count)
    assert rounds.due(engines, now) == [(each, True) for each in engines]
    read_at = {each.engine_id: now for each in engines}
    for _ in range(200):
        now += rounds.look_s + late_s
        for each, _ in rounds.due(engines, now):
            read_at[each.engine_id] = now
        longest = interval_of(wanted_s, count) + 2 * (rounds.look_s + late_s)
        assert all(now - at <= longest + 1e-6 for at in read_at.values())


def test_one_that_is_at_an_order_is_read_at_each_look() -> None:
    rounds = Rounds(60.0)
    rounds.due(fleet(3), 0.0)
    assert {each.engine_id for each, _ in rounds.due(fleet(3, 1), 0.1)} >= {"e1"}


def test_what_came_together_is_not_read_together() -> None:
    rounds, engines = Rounds(5.0), fleet(1_000)
    rounds.due(engines, 0.0)
    each_look = [len(rounds.due(engines, look * rounds.look_s)) for look in range(1, 14)]
    assert max(each_look) < 250  # of 150 when they are spread evenly


def test_what_is_gone_is_forgotten() -> None:
    rounds = Rounds(5.0)
    rounds.due(fleet(3), 0.0)
    rounds.due(fleet(1), 0.0)
    assert Counter(each.engine_id for each, _ in rounds.due(fleet(3), 0.0))["e2"] == 1


def test_what_was_read_when_it_was_registered_is_not_read_once_more() -> None:
    rounds = Rounds(60.0)
    assert [each.engine_id for each, _ in rounds.due(fleet(2), 0.0, {"e1"})] == ["e0"]
    assert {each.engine_id for each, _ in rounds.due(fleet(2), 61.0)} == {"e0", "e1"}
