from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from app.domain.errors import InvalidArgument
from app.domain.freezes import LONGEST, Freeze, check_window, refusal_of
from app.domain.operation import Actor

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def freeze(until: datetime) -> Freeze:
    return Freeze(reason="holidays", until=until, by=Actor("i", "ada", "cli"), since=NOW)


@pytest.mark.parametrize("until", [NOW + timedelta(microseconds=1), NOW + LONGEST])
def test_a_window_has_an_end_ahead(until: datetime) -> None:
    check_window(until, NOW)


@pytest.mark.parametrize("until", [NOW - SECOND, NOW, NOW + LONGEST + SECOND])
def test_a_window_that_is_over_or_without_an_end_in_sight(until: datetime) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_window(until, NOW)
    (fault,) = refused.value.faults
    assert fault.pointer == "/until"


def test_who_is_refused_hears_until_when_and_why() -> None:
    elsewhere = timezone(timedelta(hours=2))
    refused = refusal_of(freeze((NOW + 90 * SECOND).astimezone(elsewhere)), NOW)
    assert refused.message == "the engine is frozen until 2026-03-01T12:01:30Z: holidays"
    assert refused.retryable
    assert refused.retry_after_s == 91
