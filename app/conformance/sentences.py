"""What holds of everything that an engine says, judged over what was heard: no call is made here.

Each raises NotHeld for the first thing that breaks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import grpc

from app.conformance.case import expect
from app.conformance.orders import STREAMED, name_of, named
from app.conformance.record import TERMINAL, Event, Refusal, Told, kind_of
from app.rpc.openengine.v1 import admin_pb2 as pb

REASON = re.compile(r"[A-Z][A-Z0-9_]*")
KIND_OF_METHOD = {
    request.DESCRIPTOR.name.removesuffix("Request"): kind for kind, request in STREAMED.items()
}
_RESULTS: Mapping[int, str] = {kind: name_of(kind) for kind in STREAMED}
ADMIN_METHODS = {*KIND_OF_METHOD, "GetOperation", "CancelOperation", "StartProfile", "StopProfile"}
_C = grpc.StatusCode
BEFORE_ACCEPTANCE = (
    _C.INVALID_ARGUMENT,
    _C.UNIMPLEMENTED,
    _C.ALREADY_EXISTS,
    _C.ABORTED,
    _C.FAILED_PRECONDITION,
    _C.NOT_FOUND,
    _C.RESOURCE_EXHAUSTED,
    _C.UNAUTHENTICATED,
    _C.PERMISSION_DENIED,
)
_EVENTS = {*TERMINAL, "accepted", "progress", "rank", "warning"}


def result_of(method: str) -> str:
    """The field of OperationCompleted that an order of that method brings."""
    return _RESULTS[KIND_OF_METHOD[method]]


def terminals(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if kind_of(event) in TERMINAL]


def _told(streams: Iterable[Told]) -> Iterator[Told]:
    return (told for told in streams if told.events)


def accepted_first(streams: Iterable[Told]) -> None:
    for told in _told(streams):
        first = told.events[0]
        expect(kind_of(first) == "accepted", "`accepted` first", told)
        count = sum(kind_of(event) == "accepted" for event in told.events)
        expect(count == 1, "`accepted` once", told)
        expect(bool(first.operation_id), "an operation id", "none")
        kind = KIND_OF_METHOD[told.method]
        expect(first.accepted.kind == kind, f"kind {kind} of {told.method}", first.accepted.kind)
        expect(bool(first.accepted.instance_id), "an instance id", "none")
        expect(first.accepted.revision > 0, "a revision", first.accepted.revision)


def gap_free(streams: Iterable[Told]) -> None:
    for told in _told(streams):
        numbers = [event.sequence for event in told.events]
        expect(numbers == list(range(1, len(numbers) + 1)), "1, 2, 3 …", f"{told.method} {numbers}")
        times = [event.time_unix_nanos for event in told.events]
        expect(times == sorted(times) and times[0] > 0, "times that go on", times)


def one_operation(streams: Iterable[Told]) -> None:
    accepted: dict[str, Event] = {}
    for told in _told(streams):
        ids = {event.operation_id for event in told.events}
        expect(len(ids) == 1, "one operation id in a stream", ids)
        first = told.events[0]
        known = accepted.setdefault(first.operation_id, first)
        expect(known == first, "the same first event whenever an operation is told", first)


def one_terminal(streams: Iterable[Told]) -> None:
    for told in _told(streams):
        ends = [kind_of(event) for event in terminals(told.events)]
        expect(len(ends) <= 1, "one terminal event", told)
        if ends:
            expect(kind_of(told.events[-1]) == ends[0], "the terminal event last", told)
        if told.ended:
            expect(bool(ends), "a terminal event before the stream ends", told)


def ends_ok(streams: Iterable[Told]) -> None:
    for told in _told(streams):
        if told.detached or told.refusal is None:
            continue
        broken = told.refusal.of_transport and not terminals(told.events)
        expect(broken, "status OK after acceptance", told)


def same_events(streams: Iterable[Told]) -> None:
    """As far as each observer has heard them."""
    known: dict[tuple[str, int], Event] = {}
    for told in _told(streams):
        for event in told.events:
            first = known.setdefault((event.operation_id, event.sequence), event)
            expect(
                first == event,
                f"event {event.sequence} of an operation to be the same whenever it is told:"
                f" {kind_of(first)}",
                told,
            )


def same_end(streams: Iterable[Told]) -> None:
    ends: dict[str, Event] = {}
    for told in _told(streams):
        for event in terminals(told.events)[-1:]:
            known = ends.setdefault(event.operation_id, event)
            expect(known == event, f"the end {kind_of(known)} as before", told)


def known_events(streams: Iterable[Told], world_size: int) -> None:
    for told in _told(streams):
        for event in told.events:
            kind = kind_of(event)
            expect(kind in _EVENTS, "an event of a kind that the schema has", kind)
            if kind == "rank":
                state = event.rank.state
                known = state in pb.RankState.values() and state != 0
                expect(known, "a rank in a state that the schema has", state)
                there = event.rank.rank < world_size
                expect(there, f"a rank below {world_size}", event.rank.rank)
            elif kind == "progress":
                step = event.progress
                within = not step.total or step.done <= step.total
                expect(within, "progress that is not beyond its total", f"{step.done}/{step.total}")
            elif kind == "warning":
                reason = event.warning.reason
                expect(bool(REASON.fullmatch(reason)), "a reason in UPPER_SNAKE", repr(reason))


def typed_results(streams: Iterable[Told]) -> None:
    for told in _told(streams):
        for event in told.events:
            if kind_of(event) != "completed":
                continue
            wanted = result_of(told.method)
            found = event.completed.WhichOneof("result")
            expect(found == wanted, f"the result of {told.method} to be {wanted}", found)
            said = event.completed.verification
            known = said in pb.Verification.values() and said != 0
            expect(known, "how far the outcome is verified", said)
            expect(event.completed.revision > 0, "the revision that it led to", told)


def failures_say_why(streams: Iterable[Told], world_size: int) -> None:
    codes = {code.value[0] for code in grpc.StatusCode} - {0}
    for told in _told(streams):
        for event in told.events:
            if kind_of(event) != "failed":
                continue
            failed = event.failed
            expect(failed.code in codes, "a code of google.rpc, not OK", failed.code)
            whole = bool(REASON.fullmatch(failed.reason)) and bool(failed.message)
            expect(whole, "a reason in UPPER_SNAKE and a message", told_failure(failed))
            known = failed.effect in pb.FailureEffect.values() and failed.effect != 0
            expect(known, "what the failure left behind", named(pb.FailureEffect, failed.effect))
            there = all(rank < world_size for rank in failed.ranks)
            expect(there, f"ranks below {world_size}", list(failed.ranks))


def told_failure(failed: pb.OperationFailed) -> str:
    return f"{failed.reason!r}, {failed.message!r}"


def _of_the_engine(refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    return (
        refusal
        for refusal in refusals
        if refusal.method in ADMIN_METHODS and not refusal.of_transport
    )


def with_error_info(refusals: Iterable[Refusal]) -> None:
    for refusal in _of_the_engine(refusals):
        said = f"{refusal.method}: {refusal}"
        expect(refusal.info, "ErrorInfo with each refusal", said)
        expect(bool(REASON.fullmatch(refusal.reason)), "a reason in UPPER_SNAKE", said)
        expect(bool(refusal.domain), "a domain", said)


def known_codes(refusals: Iterable[Refusal]) -> None:
    wanted = ", ".join(code.name for code in BEFORE_ACCEPTANCE)
    for refusal in _of_the_engine(refusals):
        expect(refusal.code in BEFORE_ACCEPTANCE, f"one of {wanted}", refusal)
