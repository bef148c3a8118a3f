"""Sentences that hold of everything an engine says: judged over the whole run, hence last."""

from __future__ import annotations

import re

import grpc

from app.conformance.case import Case, case, expect
from app.conformance.client import terminals
from app.conformance.orders import STREAMED
from app.conformance.record import Event, Told, kind_of
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

_REASON = re.compile(r"[A-Z][A-Z0-9_]*")
_BY_METHOD = {
    request.DESCRIPTOR.name.removesuffix("Request"): kind for kind, request in STREAMED.items()
}
# What a connection says, or a client to itself; an engine says it too, but then with ErrorInfo.
_OF_THE_TRANSPORT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
_ADMIN = {*_BY_METHOD, "GetOperation", "CancelOperation", "StartProfile", "StopProfile"}


async def _some_orders(trial: Trial) -> None:
    """So that there is something to judge also when a case runs alone."""
    if trial.offers(pb.ADMIN_OPERATION_KIND_FLUSH_CACHES):
        await trial.client.told(trial.flush())
    if trial.offers(pb.ADMIN_OPERATION_KIND_PAUSE) and trial.profile.pause_modes:
        request = trial.pause()
        for again in (request, request, trial.pause()):
            await trial.client.told(again)
        await trial.settle()


def _streams(trial: Trial) -> list[Told]:
    return [told for told in trial.record.told if told.events]


@case(
    "stream.accepted-first",
    "The first event of an accepted order is `accepted`, with the operation's id, kind, instance"
    " and revision; it comes once.",
)
async def accepted_first(trial: Trial) -> None:
    await _some_orders(trial)
    for told in _streams(trial):
        first = told.events[0]
        expect(kind_of(first) == "accepted", "`accepted` first", told)
        count = sum(kind_of(event) == "accepted" for event in told.events)
        expect(count == 1, "`accepted` once", told)
        expect(bool(first.operation_id), "an operation id", "none")
        kind = _BY_METHOD[told.method]
        expect(first.accepted.kind == kind, f"kind {kind} of {told.method}", first.accepted.kind)
        expect(bool(first.accepted.instance_id), "an instance id", "none")
        expect(first.accepted.revision > 0, "a revision", first.accepted.revision)


@case(
    "stream.gap-free",
    "The events of an operation are numbered 1, 2, 3 and so on without a gap, and their times do"
    " not go back.",
)
async def gap_free(trial: Trial) -> None:
    await _some_orders(trial)
    for told in _streams(trial):
        numbers = [event.sequence for event in told.events]
        expect(numbers == list(range(1, len(numbers) + 1)), "1, 2, 3 …", f"{told.method} {numbers}")
        times = [event.time_unix_nanos for event in told.events]
        expect(times == sorted(times) and times[0] > 0, "times that go on", times)


@case(
    "stream.one-operation",
    "All events of a stream are of one operation, and no two operations share an id.",
)
async def one_operation(trial: Trial) -> None:
    await _some_orders(trial)
    accepted: dict[str, Event] = {}
    for told in _streams(trial):
        ids = {event.operation_id for event in told.events}
        expect(len(ids) == 1, "one operation id in a stream", ids)
        first = told.events[0]
        known = accepted.setdefault(first.operation_id, first)
        expect(known == first, "the same first event whenever an operation is told", first)


@case(
    "stream.one-terminal",
    "An accepted operation has exactly one terminal event, and it is the last.",
)
async def one_terminal(trial: Trial) -> None:
    await _some_orders(trial)
    for told in _streams(trial):
        ends = [kind_of(event) for event in terminals(told.events)]
        expect(len(ends) <= 1, "one terminal event", told)
        if told.ended:
            expect(len(ends) == 1, "a terminal event before the stream ends", told)
            expect(kind_of(told.events[-1]) == ends[0], "the terminal event last", told)


@case(
    "stream.ends-ok",
    "After acceptance the RPC ends OK, whatever the outcome.",
)
async def ends_ok(trial: Trial) -> None:
    await _some_orders(trial)
    for told in _streams(trial):
        if told.detached or told.refusal is None:
            continue
        broken = told.refusal.code in _OF_THE_TRANSPORT and not told.refusal.info
        expect(broken and not terminals(told.events), "status OK after acceptance", told)


@case(
    "stream.same-end",
    "A terminal state never changes: an operation has the same end whenever it is told.",
)
async def same_end(trial: Trial) -> None:
    await _some_orders(trial)
    ends: dict[str, Event] = {}
    for told in _streams(trial):
        for event in terminals(told.events)[-1:]:
            known = ends.setdefault(event.operation_id, event)
            expect(known == event, f"the end {kind_of(known)} as before", told)


@case(
    "refusal.error-info",
    "Each refusal comes with google.rpc.ErrorInfo: a stable reason in UPPER_SNAKE, and a domain.",
)
async def error_info(trial: Trial) -> None:
    key = trial.key()
    await trial.client.told(trial.order(idempotency_key=""))
    await trial.client.told(trial.order(expected_revision=trial.profile.revision + 1_000_000))
    await trial.client.ask(pb.GetAdminOperationRequest(idempotency_key=key))
    await trial.client.ask(pb.CancelAdminOperationRequest(operation_id=key))
    for refusal in trial.record.refusals:
        if refusal.method not in _ADMIN:
            continue
        if refusal.code in _OF_THE_TRANSPORT and not refusal.info:
            continue
        said = f"{refusal.method}: {refusal}"
        expect(refusal.info, "ErrorInfo with each refusal", said)
        expect(bool(_REASON.fullmatch(refusal.reason)), "a reason in UPPER_SNAKE", said)
        expect(bool(refusal.domain), "a domain", said)


CASES: tuple[Case, ...] = (
    accepted_first,
    gap_free,
    one_operation,
    one_terminal,
    ends_ok,
    same_end,
    error_info,
)
