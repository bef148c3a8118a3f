"""Deadlines: defaults, limits, and the table that is published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.domain.commands import (
    AbortRequests,
    FlushCaches,
    LoadLora,
    Pause,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    Resume,
    StartProfile,
    UnloadLora,
    UpdateWeights,
)
from app.domain.errors import InvalidArgument
from app.domain.kinds import OperationKind
from app.operations.backoff import Backoff
from app.operations.deadlines import TABLE_MS, Deadlines

PAGE = Path(__file__).parents[2] / "docs" / "operations-and-states.md"
_UNIT_MS = {"s": 1_000, "min": 60_000, "h": 3_600_000}


def test_every_kind_has_a_default_within_its_limit() -> None:
    assert set(TABLE_MS) == set(OperationKind)
    for default, longest in TABLE_MS.values():
        assert 0 < default <= longest


def test_the_published_table_is_the_one_in_force() -> None:
    row = re.compile(r"\| `(\w+)` \| (\d+) (\w+) \| (\d+) (\w+) \|")
    published = {
        OperationKind(kind): (int(a) * _UNIT_MS[unit_a], int(b) * _UNIT_MS[unit_b])
        for kind, a, unit_a, b, unit_b in row.findall(PAGE.read_text())
    }
    offered = {
        command.kind
        for command in (
            FlushCaches,
            Pause,
            Resume,
            ReleaseResources,
            RestoreResources,
            UpdateWeights,
            ReconfigureServing,
            StartProfile,
            LoadLora,
            UnloadLora,
            AbortRequests,
        )
    }
    assert published == {kind: TABLE_MS[kind] for kind in offered}


def test_a_deadline_is_the_default_or_what_was_asked_for() -> None:
    deadlines = Deadlines({OperationKind.PAUSE: 5_000})
    assert deadlines.of(OperationKind.PAUSE, None) == 5_000
    assert deadlines.of(OperationKind.PAUSE, 7_000) == 7_000
    assert deadlines.of(OperationKind.RESUME, None) == 60_000


def test_an_engine_may_allow_less() -> None:
    deadlines = Deadlines()
    assert deadlines.of(OperationKind.PAUSE, None, engine_max_ms=1_000) == 1_000
    with pytest.raises(InvalidArgument):
        deadlines.of(OperationKind.PAUSE, 2_000, engine_max_ms=1_000)


@pytest.mark.parametrize("wanted", [0, -1, 24 * 3_600_000 + 1])
def test_what_is_out_of_range_names_its_field(wanted: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Deadlines().of(OperationKind.PAUSE, wanted)
    assert [fault.pointer for fault in refused.value.faults] == ["/deadline_ms"]


@pytest.mark.parametrize("default", [0, 24 * 3_600_000 + 1])
def test_a_default_out_of_range_is_refused_at_once(default: int) -> None:
    with pytest.raises(ValueError, match="pause"):
        Deadlines({OperationKind.PAUSE: default})


def test_pauses_grow_to_a_limit_and_are_never_in_step() -> None:
    longest = Backoff(0.1, 10.0, lambda: 1.0)
    shortest = Backoff(0.1, 10.0, lambda: 0.0)
    assert [longest.pause_s(n) for n in (0, 1, 2, 3, 8, 1000)] == [0.0, 0.1, 0.2, 0.4, 10.0, 10.0]
    assert shortest.pause_s(2) == 0.1
