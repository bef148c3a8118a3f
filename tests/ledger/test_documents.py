"""Values as JSON documents, and back; also what another release wrote."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.capabilities import Capabilities
from app.domain.engine import Member, TlsNames
from app.domain.facts import EngineFacts
from app.domain.operation import OperationError, OperationWarning, Progress
from app.domain.ranks import RankReport
from app.ledger.column_types import storable
from app.ledger.documents import document, json_object, read
from tests.ledger.test_engines import CAPABILITIES, FACTS

utc = st.datetimes(timezones=st.just(UTC))
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
VALUES = st.one_of(
    st.builds(EngineFacts, observed_at=utc),
    st.builds(Capabilities),
    st.builds(RankReport),
    st.builds(Progress),
    st.builds(OperationError),
    st.builds(OperationWarning),
    st.builds(Member),
    st.builds(TlsNames),
    st.just(FACTS),
    st.just(CAPABILITIES),
)
st.register_type_strategy(datetime, utc)
st.register_type_strategy(str, words)


@given(VALUES)
def test_a_value_comes_back_through_json(value: Any) -> None:
    stored = json.loads(json.dumps(document(value), allow_nan=False))
    assert read(type(value), stored) == value


def test_a_field_of_another_release_does_no_harm() -> None:
    stored = document(CAPABILITIES)
    assert isinstance(stored, dict)
    newer = stored | {"what_comes_next": [1, 2], "limits": {"no_such_limit": 3}}
    del newer["weight_sources"]
    known = read(Capabilities, newer)
    assert known.operations == CAPABILITIES.operations
    assert known.weight_sources == frozenset()
    assert known.limits.max_message_bytes == 0
    assert {field.name for field in fields(known)}.isdisjoint({"what_comes_next"})


@given(st.text(st.characters()))
def test_every_text_can_be_stored(text: str) -> None:
    kept = storable(text)
    assert "\x00" not in kept
    kept.encode()
    if "\x00" not in text and not any(0xD800 <= ord(each) <= 0xDFFF for each in text):
        assert kept == text


def test_halves_of_one_character_are_joined() -> None:
    assert storable("\ud83d\udea2 \udea2\x00") == "🚢 ��"


def test_numbers_that_json_does_not_have_are_left_out() -> None:
    assert json_object({"a": float("inf"), "b": [float("nan"), 1.5, 2]}) == {
        "a": None,
        "b": [None, 1.5, 2],
    }


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        document(object())
