"""Messages survive the way between processes, and nothing else gets through."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.reference_engine import messages as m
from app.reference_engine.limits import CoreSettings
from app.reference_engine.wire import (
    HEADER,
    MAX_FRAME_BYTES,
    MalformedFrame,
    decode_body,
    encode_frame,
    frame_length,
)

ALL = (
    *typing.get_args(m.Order),
    *typing.get_args(m.Result),
    *typing.get_args(m.Report),
    m.Entry,
    m.Start,
    m.StepPlan,
    m.Ping,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value a field may have, from its annotation."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of([values_of(one) for one in arguments])
    if hint is CoreSettings:
        return st.builds(CoreSettings, step_delay_ms=st.integers(0, 9), kv_blocks=st.just(7))
    if dataclasses.is_dataclass(hint):
        return messages_of(typing.cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    if hint is str:
        return st.text()
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is int:
        return st.integers(0, 2**64)
    return st.from_type(hint)


def messages_of(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: values_of(hint) for name, hint in hints.items()})


@given(st.lists(st.sampled_from(ALL).flatmap(messages_of), max_size=4))
def test_messages_come_back_equal(batch: list[Any]) -> None:
    frame = encode_frame(batch)
    assert frame_length(frame[: HEADER.size]) == len(frame) - HEADER.size
    found = decode_body(frame[HEADER.size :])
    assert found == batch
    # An enumeration's member equals its plain string; its representation does not.
    assert repr(found) == repr(batch)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[{}]",
        b'"text"',
        b"\xff",
        b'[{"@": "Path"}]',
        b'[{"@": "Submitted"}]',
        b'[{"@": "Done", "more": 1}]',
        b'[{"@": "Submitted", "status": "unheard-of"}]',
    ],
)
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_body(body)


def test_a_frame_is_bounded() -> None:
    with pytest.raises(MalformedFrame, match="exceeds"):
        frame_length(HEADER.pack(MAX_FRAME_BYTES + 1))
    huge = m.StartFailed(rank=0, message="x" * MAX_FRAME_BYTES)
    with pytest.raises(MalformedFrame, match="exceeds"):
        encode_frame([huge])


def test_a_request_id_can_not_pose_as_a_message() -> None:
    outcome = m.Aborted((m.AbortOf('{"@": "Shutdown"}', m.AbortStatus.ABORTED),))
    body = encode_frame([outcome])[HEADER.size :]
    assert decode_body(body) == [outcome]
    assert len(json.loads(body)) == 1
