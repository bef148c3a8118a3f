"""What is tried again and again is not said again and again."""

from __future__ import annotations

import logging

import pytest

from app.backends.telling import FLAPS_S, REMIND_S, Trouble

log = logging.getLogger("tests.telling")


class Watch:
    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def trouble(watch: Watch, caplog: pytest.LogCaptureFixture) -> Trouble:
    caplog.set_level(logging.INFO, log.name)
    return Trouble(log, "engine e", watch)


def test_the_same_is_said_once_and_then_seldom(
    trouble: Trouble, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        trouble.seen(logging.WARNING, "gone")
        watch.at += REMIND_S / 100
    trouble.seen(logging.WARNING, "gone")
    assert caplog.messages == ["engine e: gone", "engine e: gone (100 times since)"]


def test_its_kind_makes_it_the_same_and_not_its_words(
    trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        trouble.seen(logging.INFO, f"refused at {number}", "away")
    trouble.seen(logging.ERROR, "its certificate is another's")
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.INFO, "engine e: refused at 0"),
        (logging.ERROR, "engine e: its certificate is another's"),
    ]


def test_that_it_is_over_is_said_once(trouble: Trouble, caplog: pytest.LogCaptureFixture) -> None:
    trouble.over()
    trouble.seen(logging.INFO, "gone")
    trouble.over()
    trouble.over()
    assert caplog.messages == ["engine e: gone", "engine e: well again"]


def test_what_comes_and_goes_is_said_once_a_minute_at_most(
    trouble: Trouble, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(60):
        trouble.seen(logging.INFO, "gone")
        trouble.over()
        watch.at += FLAPS_S / 60
    assert caplog.messages == ["engine e: gone", "engine e: well again"]
    trouble.seen(logging.INFO, "gone")
    assert caplog.messages[2:] == ["engine e: gone"]
