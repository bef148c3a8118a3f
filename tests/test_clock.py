"""Time and ids."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import RFC_4122, UUID

from hypothesis import given
from hypothesis import strategies as st

from app.clock import SystemClock, Uuid7, uuid7


def millisecond(written: str) -> int:
    return UUID(written).int >> 80


def test_the_system_clock_is_aware_and_in_utc() -> None:
    before = datetime.now(UTC)
    now = SystemClock().now()
    assert before <= now <= datetime.now(UTC)
    assert now.tzinfo is UTC


def test_an_id_is_a_uuid_of_version_7_and_of_now() -> None:
    before = datetime.now(UTC).timestamp()
    made = uuid7()
    after = datetime.now(UTC).timestamp()
    parsed = UUID(made)
    assert str(parsed) == made
    assert (parsed.version, parsed.variant) == (7, RFC_4122)
    assert int(before * 1000) <= millisecond(made) <= int(after * 1000)


def test_ids_are_not_repeated() -> None:
    assert len({uuid7() for _ in range(10_000)}) == 10_000


def test_a_known_moment_is_spelled_as_the_standard_has_it() -> None:
    # The example of RFC 9562, appendix A.6.
    moment_ms, fraction, rest = 0x017F22E279B0, 0xCC3, 0x18C4DC0C0C07398F
    nanoseconds = moment_ms * 1_000_000 + -(-fraction * 1_000_000 // 4096)
    source = Uuid7(lambda: nanoseconds, lambda _bits: rest)
    assert source() == "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"


@given(st.lists(st.integers(0, 2**61), min_size=1, max_size=50))
def test_ids_of_one_source_rise_whatever_the_clock_does(times: list[int]) -> None:
    clock = iter(times)
    source = Uuid7(lambda: next(clock), lambda _bits: 0)
    made = [source() for _ in times]
    assert made == sorted(set(made))
    assert all(UUID(each).version == 7 for each in made)
