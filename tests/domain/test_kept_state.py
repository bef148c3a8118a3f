"""What is kept of an engine that keeps nothing itself."""

from __future__ import annotations

from dataclasses import replace

from app.domain.kept_state import KeptState

FIRST = KeptState(number=1, revision=1, pause_epoch=0, release_epoch=0)


def test_a_first_version_has_nothing_under_way() -> None:
    assert (FIRST.operation_id, FIRST.abandoned, FIRST.document) == (None, False, {})


def test_versions_that_say_the_same_are_the_same() -> None:
    assert replace(FIRST) == FIRST
    assert replace(FIRST, number=2) != FIRST
