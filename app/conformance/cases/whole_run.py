"""Sentences that hold of everything an engine says: judged over the whole run, hence last."""

from __future__ import annotations

from app.conformance import sentences
from app.conformance.case import Case, NotApplicable, case, expect
from app.conformance.client import brief
from app.conformance.record import TERMINAL, Told, kind_of
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

# So many operations are asked for again at the end.
_ASKED_AGAIN = 500


async def _some_orders(trial: Trial) -> None:
    """So that there is something to judge also when a case runs alone."""
    if trial.offers(pb.ADMIN_OPERATION_KIND_FLUSH_CACHES):
        await trial.client.told(trial.flush())
    if trial.offers(pb.ADMIN_OPERATION_KIND_PAUSE) and trial.profile.pause_modes:
        request = trial.pause()
        for again in (request, request, trial.pause()):
            await trial.client.told(again)
        await trial.settle()


async def _streams(trial: Trial) -> list[Told]:
    await _some_orders(trial)
    return trial.record.told


@case(
    "stream.accepted-first",
    "The first event of an accepted order is `accepted`, with the operation's id, kind, instance"
    " and revision; it comes once.",
)
async def accepted_first(trial: Trial) -> None:
    sentences.accepted_first(await _streams(trial))


@case(
    "stream.gap-free",
    "The events of an operation are numbered 1, 2, 3 and so on without a gap, and their times do"
    " not go back.",
)
async def gap_free(trial: Trial) -> None:
    sentences.gap_free(await _streams(trial))


@case(
    "stream.one-operation",
    "All events of a stream are of one operation, and no two operations share an id.",
)
async def one_operation(trial: Trial) -> None:
    sentences.one_operation(await _streams(trial))


@case(
    "stream.one-terminal",
    "An accepted operation has exactly one terminal event, and it is the last.",
)
async def one_terminal(trial: Trial) -> None:
    sentences.one_terminal(await _streams(trial))


@case(
    "stream.ends-ok",
    "After acceptance the RPC ends OK, whatever the outcome.",
)
async def ends_ok(trial: Trial) -> None:
    sentences.ends_ok(await _streams(trial))


@case(
    "stream.same-events",
    "Every observer of an operation hears the same events, whenever it attaches.",
)
async def same_events(trial: Trial) -> None:
    sentences.same_events(await _streams(trial))


@case(
    "stream.same-end",
    "A terminal state never changes: an operation has the same end whenever it is told.",
)
async def same_end(trial: Trial) -> None:
    sentences.same_end(await _streams(trial))


@case(
    "stream.known-events",
    "Every event is of a kind that the schema has; ranks are ranks of the engine, warnings have a"
    " reason, and progress does not go beyond its total.",
)
async def known_events(trial: Trial) -> None:
    sentences.known_events(await _streams(trial), trial.most_ranks)


@case(
    "stream.typed-result",
    "A completed operation brings the result of its own kind, the revision that it led to, and how"
    " far the outcome is verified.",
)
async def typed_result(trial: Trial) -> None:
    sentences.typed_results(await _streams(trial))


@case(
    "stream.failure-says-why",
    "A failed operation has a code, a reason in UPPER_SNAKE, a message, and says what it left"
    " behind.",
)
async def failure_says_why(trial: Trial) -> None:
    """Those of the run; where there were none, of a drain that is given too little time."""
    if not any(kind_of(event) == "failed" for told in trial.record.told for event in told.events):
        if trial.options.inference is None:
            raise NotApplicable("no operation of this run has failed")
        async with trial.outlasted(300):
            pass
    sentences.failures_say_why(trial.record.told, trial.most_ranks)


@case(
    "operation.kept",
    "An operation that has ended is still found, with the end that was told, as long as the profile"
    " says that operations are kept.",
)
async def kept(trial: Trial) -> None:
    """Those of this run, as many as the profile promises to keep."""
    ends = {
        event.operation_id: event
        for told in await _streams(trial)
        for event in told.events
        if kind_of(event) in TERMINAL
    }
    promised = min(_ASKED_AGAIN, int(trial.profile.limits.operations_kept))
    for operation_id, event in list(ends.items())[-promised:]:
        found = await trial.client.operation(operation_id=operation_id)
        outcome = found.WhichOneof("outcome")
        as_told = outcome == kind_of(event) and getattr(found, kind_of(event)) == getattr(
            event, kind_of(event)
        )
        expect(as_told, f"the end as it was told: {brief(event)}", brief(found))


@case(
    "refusal.error-info",
    "Each refusal comes with google.rpc.ErrorInfo: a stable reason in UPPER_SNAKE, and a domain.",
)
async def error_info(trial: Trial) -> None:
    await _some_refusals(trial)
    sentences.with_error_info(trial.record.refusals)


@case(
    "refusal.status",
    "Before acceptance an order is refused with one of the statuses of the contract, never with"
    " INTERNAL, UNKNOWN or another.",
)
async def status(trial: Trial) -> None:
    await _some_refusals(trial)
    sentences.known_codes(trial.record.refusals)


async def _some_refusals(trial: Trial) -> None:
    key = trial.key()
    await trial.client.told(trial.order(idempotency_key=""))
    await trial.client.told(trial.order(expected_revision=trial.profile.revision + 1_000_000))
    await trial.client.ask(pb.GetAdminOperationRequest(idempotency_key=key))
    await trial.client.ask(pb.CancelAdminOperationRequest(operation_id=key))


CASES: tuple[Case, ...] = (
    accepted_first,
    gap_free,
    one_operation,
    one_terminal,
    ends_ok,
    same_events,
    same_end,
    known_events,
    typed_result,
    failure_says_why,
    kept,
    error_info,
    status,
)
