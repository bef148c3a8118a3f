"""Verdicts over what was heard: right streams are never found wrong, each fault is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.conformance import sentences
from app.conformance.case import NotHeld
from app.conformance.record import Event, Refusal, Told
from app.rpc.openengine.v1 import admin_pb2 as pb

RANKS = 2
_UPPER = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1).map(lambda text: f"A{text}")
_METHODS = st.sampled_from(sorted(sentences.KIND_OF_METHOD))
Streams = list[Told]

JUDGES: dict[str, Callable[[Streams], None]] = {
    "accepted_first": sentences.accepted_first,
    "gap_free": sentences.gap_free,
    "one_operation": sentences.one_operation,
    "one_terminal": sentences.one_terminal,
    "ends_ok": sentences.ends_ok,
    "same_events": sentences.same_events,
    "same_end": sentences.same_end,
    "known_events": lambda streams: sentences.known_events(streams, RANKS),
    "typed_results": sentences.typed_results,
    "failures_say_why": lambda streams: sentences.failures_say_why(streams, RANKS),
}


def _middle(draw: st.DrawFn, event: Event) -> None:
    match draw(st.sampled_from(("progress", "rank", "warning"))):
        case "progress":
            total = draw(st.integers(0, 9))
            event.progress.done = draw(st.integers(0, total or 9))
            event.progress.total = total
        case "rank":
            event.rank.rank = draw(st.integers(0, RANKS - 1))
            event.rank.state = draw(st.sampled_from(pb.RankState.values()[1:]))
        case "warning":
            event.warning.reason = draw(_UPPER)


def _end(draw: st.DrawFn, event: Event, method: str) -> None:
    match draw(st.sampled_from(("completed", "failed", "cancelled"))):
        case "completed":
            event.completed.revision = draw(st.integers(1, 99))
            event.completed.verification = pb.VERIFICATION_VERIFIED
            result = sentences.result_of(method)
            getattr(event.completed, result).SetInParent()
        case "failed":
            event.failed.code = draw(st.integers(1, 16))
            event.failed.reason = draw(_UPPER)
            event.failed.message = "why"
            event.failed.effect = draw(st.sampled_from(pb.FailureEffect.values()[1:]))
            event.failed.ranks.extend(draw(st.sets(st.integers(0, RANKS - 1))))
        case "cancelled":
            event.cancelled.SetInParent()


@st.composite
def operation(draw: st.DrawFn, operation_id: str) -> tuple[str, list[Event]]:
    """The method, and all events of one operation, as a right engine tells them."""
    method = draw(_METHODS)
    time = draw(st.integers(1, 1_000))
    events = []
    count = draw(st.integers(2, 6))
    for number in range(1, count + 1):
        time += draw(st.integers(0, 9))
        event = Event(operation_id=operation_id, sequence=number, time_unix_nanos=time)
        if number == 1:
            event.accepted.kind = sentences.KIND_OF_METHOD[method]
            event.accepted.instance_id = "instance"
            event.accepted.revision = draw(st.integers(1, 99))
        elif number < count:
            _middle(draw, event)
        else:
            _end(draw, event, method)
        events.append(event)
    return method, events


@st.composite
def streams(draw: st.DrawFn) -> Streams:
    """Each operation is told once at least to its end; some observers hear less."""
    told: Streams = []
    for number in range(draw(st.integers(1, 3))):
        method, events = draw(operation(f"operation-{number}"))
        told.append(Told(method, [_copy(event) for event in events], ended=True))
        for _ in range(draw(st.integers(0, 2))):
            told.append(_observer(draw, method, events))
    return told


def _observer(draw: st.DrawFn, method: str, events: list[Event]) -> Told:
    heard = [_copy(event) for event in events[: draw(st.integers(0, len(events)))]]
    whole = len(heard) == len(events)
    if whole:
        return Told(method, heard, ended=True)
    broken = Refusal(method=method, code=grpc.StatusCode.UNAVAILABLE, message="", info=False)
    if draw(st.booleans()):
        return Told(method, heard, refusal=broken)
    return Told(method, heard, detached=True)


def _copy(event: Event) -> Event:
    copy = Event()
    copy.CopyFrom(event)
    return copy


def found_by(told: Streams) -> set[str]:
    found = set()
    for name, judge in JUDGES.items():
        try:
            judge(told)
        except NotHeld:
            found.add(name)
    return found


@given(streams())
def test_what_a_right_engine_says_is_never_found_wrong(told: Streams) -> None:
    assert found_by(told) == set()


@given(streams(), st.randoms(use_true_random=False))
def test_the_order_of_the_streams_does_not_matter(told: Streams, random: Any) -> None:
    random.shuffle(told)
    assert found_by(told) == set()


# ---- one fault each, in one stream that was heard to its end ----


def _twice_terminal(told: Told) -> None:
    again = _copy(told.events[-1])
    again.sequence += 1
    told.events.append(again)


def _no_terminal(told: Told) -> None:
    del told.events[-1]


def _after_the_end(told: Told) -> None:
    more = Event(operation_id=told.events[0].operation_id, sequence=len(told.events) + 1)
    more.time_unix_nanos = told.events[-1].time_unix_nanos
    more.progress.phase = "more"
    told.events.append(more)


def _gap(told: Told) -> None:
    told.events[-1].sequence += 1


def _from_zero(told: Told) -> None:
    for event in told.events:
        event.sequence -= 1


def _back_in_time(told: Told) -> None:
    told.events[-1].time_unix_nanos = told.events[0].time_unix_nanos - 1


def _no_accepted(told: Told) -> None:
    del told.events[0]


def _other_kind(told: Told) -> None:
    told.events[0].accepted.kind = pb.ADMIN_OPERATION_KIND_SHUTDOWN


def _no_instance(told: Told) -> None:
    told.events[0].accepted.instance_id = ""


def _other_operation(told: Told) -> None:
    told.events[-1].operation_id += "-b"


def _status(told: Told) -> None:
    told.ended = False
    told.refusal = Refusal(method=told.method, code=grpc.StatusCode.UNKNOWN, message="", info=False)


def _no_kind(told: Told) -> None:
    told.events[-1].ClearField("event")


FAULTS: dict[Callable[[Told], None], str] = {
    _twice_terminal: "one_terminal",
    _no_terminal: "one_terminal",
    _after_the_end: "one_terminal",
    _gap: "gap_free",
    _from_zero: "gap_free",
    _back_in_time: "gap_free",
    _no_accepted: "accepted_first",
    _other_kind: "accepted_first",
    _no_instance: "accepted_first",
    _other_operation: "one_operation",
    _status: "ends_ok",
    _no_kind: "known_events",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@given(told=streams(), data=st.data())
def test_each_fault_is_found_wherever_it_is(
    fault: Callable[[Told], None], told: Streams, data: st.DataObject
) -> None:
    whole = [one for one in told if one.ended]
    fault(data.draw(st.sampled_from(whole)))
    assert FAULTS[fault] in found_by(told)


@given(streams(), st.data())
def test_another_end_for_another_observer_is_found(told: Streams, data: st.DataObject) -> None:
    victim = data.draw(st.sampled_from([one for one in told if one.ended]))
    other = Told(victim.method, [_copy(event) for event in victim.events], ended=True)
    end = other.events[-1]
    moved = data.draw(st.sampled_from(("time", "outcome")))
    if moved == "time":
        end.time_unix_nanos += 1
    else:
        was = end.WhichOneof("event")
        end.cancelled.message = "instead" if was == "cancelled" else ""
        end.cancelled.SetInParent()
    told.insert(data.draw(st.integers(0, len(told))), other)
    assert {"same_end", "same_events"} <= found_by(told)


@given(streams(), st.data())
def test_another_middle_for_another_observer_is_found(told: Streams, data: st.DataObject) -> None:
    victim = data.draw(st.sampled_from([one for one in told if one.ended]))
    other = Told(victim.method, [_copy(event) for event in victim.events], ended=True)
    data.draw(st.sampled_from(other.events[:-1])).time_unix_nanos += 1
    told.append(other)
    assert "same_events" in found_by(told)


# ---- refusals ----

_CODES = st.sampled_from(sentences.BEFORE_ACCEPTANCE)
_REFUSALS = st.builds(
    Refusal,
    method=st.sampled_from(sorted(sentences.ADMIN_METHODS)),
    code=_CODES,
    message=st.text(),
    info=st.just(True),
    reason=_UPPER,
    domain=st.text(min_size=1),
)


@given(st.lists(_REFUSALS))
def test_right_refusals_are_never_found_wrong(refusals: list[Refusal]) -> None:
    sentences.with_error_info(refusals)
    sentences.known_codes(refusals)


@given(st.lists(_REFUSALS), _REFUSALS, st.data())
def test_one_wrong_refusal_is_found_among_right_ones(
    refusals: list[Refusal], wrong: Refusal, data: st.DataObject
) -> None:
    broken = data.draw(
        st.sampled_from(
            (
                replace(wrong, info=False, reason="", domain=""),
                replace(wrong, reason="lower"),
                replace(wrong, reason=""),
                replace(wrong, domain=""),
            )
        )
    )
    refusals.insert(data.draw(st.integers(0, len(refusals))), broken)
    with pytest.raises(NotHeld):
        sentences.with_error_info(refusals)


@given(st.lists(_REFUSALS), _REFUSALS, st.data())
def test_a_status_of_no_contract_is_found(
    refusals: list[Refusal], wrong: Refusal, data: st.DataObject
) -> None:
    code = data.draw(st.sampled_from(sorted(set(grpc.StatusCode), key=str)))
    refusals.insert(data.draw(st.integers(0, len(refusals))), replace(wrong, code=code))
    if code in sentences.BEFORE_ACCEPTANCE:
        sentences.known_codes(refusals)
    else:
        with pytest.raises(NotHeld):
            sentences.known_codes(refusals)


@given(_REFUSALS)
def test_what_the_transport_says_is_nobodys_fault(refusal: Refusal) -> None:
    away = replace(refusal, code=grpc.StatusCode.UNAVAILABLE, info=False)
    sentences.with_error_info([away])
    sentences.known_codes([away])
