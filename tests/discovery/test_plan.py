"""What is done about a list, given what is registered."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from app.discovery.plan import LABEL, Change, LeaveAlone, Register, Remove, planned
from app.domain.engine import Dialect, Member, Registration, TlsNames
from app.operations.registering import EngineChange
from tests.discovery.conftest import draft, listing

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OURS = {LABEL: "file"}


def there(engine_id: str = "e1", **changes: Any) -> Registration:
    values: dict[str, Any] = {
        "id": engine_id,
        "dialect": Dialect.OPENENGINE,
        "members": (Member(0, "127.0.0.1:1", "127.0.0.1:1"),),
        "labels": OURS,
        "generation": 4,
        "created_at": NOW,
        "updated_at": NOW,
    }
    return Registration(**(values | changes))


def test_what_is_new_is_registered_as_the_sources_own() -> None:
    (step,) = planned("file", listing(draft(labels={"team": "a"})), [])
    assert step == Register(draft(labels={"team": "a", LABEL: "file"}))


def test_what_is_as_listed_is_let_be() -> None:
    assert planned("file", listing(draft()), [there()]) == ()


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        (
            {"members": (Member(0, "127.0.0.1:2", "127.0.0.1:2"),)},
            EngineChange(members=(Member(0, "127.0.0.1:2", "127.0.0.1:2"),)),
        ),
        ({"tls": TlsNames(credential="c")}, EngineChange(tls=TlsNames(credential="c"))),
        ({"labels": {"x": "y"}}, EngineChange(labels={"x": "y", LABEL: "file"})),
    ],
)
def test_only_what_differs_is_changed(changes: dict[str, Any], change: EngineChange) -> None:
    steps = planned("file", listing(draft(**changes)), [there()])
    assert steps == (Change("e1", 4, change),)


def test_what_is_no_longer_listed_is_removed_before_anything_is_added() -> None:
    steps = planned("file", listing(draft("e0")), [there()])
    assert steps == (Remove("e1", 4), Register(draft("e0", labels=OURS)))


@pytest.mark.parametrize(
    ("labels", "why"),
    [({}, "is registered by hand"), ({LABEL: "rack"}, "is registered by rack")],
)
def test_what_is_another_s_is_left_alone(labels: dict[str, str], why: str) -> None:
    other = there(labels=labels)
    assert planned("file", listing(draft()), [other]) == (LeaveAlone("e1", why),)
    assert planned("file", {}, [other]) == ()


def test_an_engine_does_not_change_its_dialect() -> None:
    (step,) = planned("file", listing(draft(dialect=Dialect.VLLM)), [there()])
    assert isinstance(step, LeaveAlone)
