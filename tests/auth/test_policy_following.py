"""How a running gateway looks at its policy file: when it waits, and what it says of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.auth.policy.live import LivePolicy
from app.auth.policy.reading import MAX_BYTES, read_policy

POLICY = """
[[rules]]
name = "r"
who = "anyone"
scopes = "admin:read"
engines = "all"
"""
OTHER = POLICY.replace("read", "pause")


class Sleeps(list[float]):
    """Those that were wanted; none is slept."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return path


def test_only_another_content_is_waited_for_and_only_where_that_is_wanted(path: Path) -> None:
    waits, at_once = Sleeps(), Sleeps()
    patient, quick = LivePolicy(path, settle_s=2.5, sleep=waits), LivePolicy(path, sleep=at_once)
    assert (patient.look(), quick.look(), waits) == ("unchanged", "unchanged", [])
    path.write_text(OTHER)
    assert (patient.look(), quick.look()) == ("loaded", "loaded")
    assert (waits, at_once) == ([2.5], [])
    assert patient.policy == quick.policy == read_policy(OTHER.encode())


def test_another_fault_or_another_content_with_the_same_is_told(path: Path) -> None:
    live = LivePolicy(path)
    path.unlink()
    assert (live.look(), live.look()) == ("refused", "unchanged")
    os.mkfifo(path)  # neither has a content, and they are not the same
    assert (live.look(), live.sha256) == ("refused", None)
    assert live.look() == "unchanged"
    path.unlink()
    for text in ("a = 1", "a = 2"):
        path.write_text(text)
        assert (live.look(), live.look()) == ("refused", "unchanged")
    path.write_text(POLICY)
    assert (live.look(), live.faults) == ("loaded", ())


def test_the_largest_file_counts_and_one_byte_more_is_not_left_out(path: Path) -> None:
    live = LivePolicy(path)
    path.write_text(OTHER + "#" * (MAX_BYTES - len(OTHER)))
    assert live.look() == "loaded"
    path.write_text(POLICY + "#" * (MAX_BYTES + 1 - len(POLICY)))
    assert live.look() == "refused"


def test_of_no_file_there_is_nothing_to_say() -> None:
    live = LivePolicy(None)
    assert (live.sha256, live.faults) == (None, ())
