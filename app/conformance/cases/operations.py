"""Finding an operation again, and asking for its cancellation."""

from __future__ import annotations

from typing import Any

import grpc

from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import brief, completed_of, ends_with
from app.conformance.orders import named
from app.conformance.record import Refusal, kind_of
from app.conformance.traffic import expect_going_on
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lifecycle_pb2

_S = pb.AdminOperationState
_ENDED = {
    "completed": _S.ADMIN_OPERATION_STATE_SUCCEEDED,
    "failed": _S.ADMIN_OPERATION_STATE_FAILED,
    "cancelled": _S.ADMIN_OPERATION_STATE_CANCELLED,
}
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@case(
    "operation.by-id-and-key",
    "An operation is found by its id and by its key alike, and says what its events said.",
)
async def by_id_and_key(trial: Trial) -> None:
    request = trial.order()
    told = await trial.client.told(request)
    completed_of(told)
    first, last = told.events[0], told.events[-1]
    by_id = await trial.client.operation(operation_id=first.operation_id)
    by_key = await trial.client.operation(idempotency_key=request.idempotency_key)
    expect(by_id == by_key, f"the same by key as by id: {brief(by_id)}", brief(by_key))
    for name, wanted, found in (
        ("id", first.operation_id, by_id.operation_id),
        ("key", request.idempotency_key, by_id.idempotency_key),
        ("kind", first.accepted.kind, by_id.kind),
        ("state", _ENDED[kind_of(last)], by_id.state),
        ("instance", first.accepted.instance_id, by_id.instance_id),
        ("last sequence", last.sequence, by_id.last_sequence),
        ("outcome", last.completed, by_id.completed),
    ):
        expect(wanted == found, f"{name} {brief(wanted)}", brief(found))
    expect(
        0 < by_id.created_unix_nanos <= by_id.ended_unix_nanos,
        "an operation that ended after it was created",
        f"{by_id.created_unix_nanos} to {by_id.ended_unix_nanos}",
    )


@case(
    "operation.unknown",
    "An id or key that the engine does not know is NOT_FOUND; none at all is INVALID_ARGUMENT.",
)
async def unknown(trial: Trial) -> None:
    asked = pb.GetAdminOperationRequest
    await trial.client.refused(asked(operation_id=f"no-{trial.prefix}"), NOT_FOUND)
    await trial.client.refused(asked(idempotency_key=f"no-{trial.prefix}"), NOT_FOUND)
    for empty in (asked(), asked(operation_id=""), asked(idempotency_key="")):
        await trial.client.refused(empty, INVALID)


@case(
    "operation.open-in-state",
    "A running operation stands among the open ones of the profile, with its id, key and kind.",
    Need.INFERENCE,
)
async def open_in_state(trial: Trial) -> None:
    key = trial.key()
    async with trial.draining(idempotency_key=key) as (_, operation_id, generation):
        found = list((await trial.client.profile()).state.open_operations)
        named = [(o.operation_id, o.idempotency_key, o.kind) for o in found]
        wanted = (operation_id, key, pb.ADMIN_OPERATION_KIND_PAUSE)
        expect(named == [wanted], f"one open operation {wanted}", named)
        generation.hang_up()


@case("cancel.unknown", "Cancelling what the engine does not know is NOT_FOUND.")
async def cancel_unknown(trial: Trial) -> None:
    asked = pb.CancelAdminOperationRequest
    await trial.client.refused(asked(operation_id=f"no-{trial.prefix}"), NOT_FOUND)
    await trial.client.refused(asked(), INVALID)


@case(
    "cancel.ended",
    "An operation that has ended cannot be cancelled: FAILED_PRECONDITION, and its end stays.",
)
async def cancel_ended(trial: Trial) -> None:
    told = await trial.client.told(trial.order())
    completed_of(told)
    operation_id = told.events[0].operation_id
    before = await trial.client.operation(operation_id=operation_id)
    async with trial.unchanged("a cancellation that came too late"):
        await trial.client.refused(
            pb.CancelAdminOperationRequest(operation_id=operation_id),
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    after = await trial.client.operation(operation_id=operation_id)
    expect(before == after, f"the operation as it was: {brief(before)}", brief(after))


def _drain_is_cancellable(trial: Trial) -> bool:
    return any(
        support.kind == pb.ADMIN_OPERATION_KIND_PAUSE and support.cancellable
        for support in trial.profile.operations
    )


@case(
    "cancel.running-drain",
    "Where a pause is offered as cancellable, a running drain that is cancelled ends cancelled,"
    " opens admission again, and leaves the requests alone.",
    Need.INFERENCE,
)
async def cancel_drain(trial: Trial) -> None:
    trial.require_pauses(pb.PAUSE_MODE_DRAIN)
    if not _drain_is_cancellable(trial):
        raise NotPromised("the profile does not offer to cancel a pause")
    async with trial.draining() as (stream, operation_id, generation):
        answer = await trial.client.answered(
            pb.CancelAdminOperationRequest(operation_id=operation_id)
        )
        taken = (_S.ADMIN_OPERATION_STATE_CANCELLING, _S.ADMIN_OPERATION_STATE_CANCELLED)
        expect(answer.operation.state in taken, "state CANCELLING or CANCELLED", brief(answer))
        told = await stream.rest()
        expect(ends_with(told, "cancelled"), "the drain to end cancelled", told)
        expect_going_on(generation)
        state = (await trial.client.profile()).state
        expect(
            state.admission == pb.ADMISSION_STATE_OPEN,
            "admission OPEN after the drain was cancelled",
            named(pb.AdmissionState, state.admission),
        )
        found = await trial.client.operation(operation_id=operation_id)
        cancelled = found.state == _S.ADMIN_OPERATION_STATE_CANCELLED
        expect(cancelled, "GetOperation to say CANCELLED", brief(found))
    short = trial.traffic.ask(4)
    await short.over(trial.patience_s, "after admission has opened")
    expect(short.whole, "a new request to be answered", short)


@case(
    "cancel.not-offered",
    "Where a pause is not offered as cancellable, cancelling one is FAILED_PRECONDITION or"
    " UNIMPLEMENTED, and it goes on.",
    Need.INFERENCE,
)
async def cancel_not_offered(trial: Trial) -> None:
    trial.require_pauses(pb.PAUSE_MODE_DRAIN)
    if _drain_is_cancellable(trial):
        raise NotPromised("the profile offers to cancel a pause")
    async with trial.draining() as (stream, operation_id, generation):
        wanted = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
        request = pb.CancelAdminOperationRequest(operation_id=operation_id)
        await trial.client.refused(request, *wanted)
        generation.hang_up()
        completed_of(await stream.rest())


@case(
    "deadline.running-drain",
    "A drain that does not end within its deadline fails with DEADLINE_EXCEEDED and opens admission"
    " again; both are changes, so that the revision has risen, and the failure tells it.",
    Need.INFERENCE,
)
async def deadline(trial: Trial) -> None:
    before = (await trial.client.profile()).revision
    async with trial.outlasted(800) as (told, generation):
        now = (await trial.client.profile()).revision
        expect(now > before, f"a revision above {before}", now)
        stated = told.events[-1].failed.revision
        expect(stated == now, f"the failure to tell revision {now}", stated)
        failed = told.events[-1].failed
        code = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        expect(failed.code == code, f"code {code} (DEADLINE_EXCEEDED)", brief(failed))
        expect_going_on(generation)
        state = (await trial.client.profile()).state
        expect(
            state.admission == pb.ADMISSION_STATE_OPEN,
            "admission OPEN after the drain failed",
            named(pb.AdmissionState, state.admission),
        )


@case(
    "operation.model",
    "An order that names the whole engine, or its model where it serves one alone, is carried out.",
)
async def model_named(trial: Trial) -> None:
    targets: list[dict[str, Any]] = [{"whole_engine": pb.WholeEngine()}]
    if len(trial.profile.models) == 1:
        targets.append({"model": trial.profile.models[0]})
    for target in targets:
        await trial.client.completed(trial.order(**target))
        await trial.settle()


@case(
    "abort.unknown",
    "Aborting a request that the engine does not have is NOT_FOUND; naming none is"
    " INVALID_ARGUMENT, never all of them.",
)
async def abort_unknown(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_ABORT_REQUESTS)
    for request, code in (
        (lifecycle_pb2.AbortRequest(request_id=f"no-{trial.prefix}"), NOT_FOUND),
        (lifecycle_pb2.AbortRequest(), INVALID),
        (lifecycle_pb2.AbortRequest(request_id=""), INVALID),
    ):
        answer = await trial.client.of_control("Abort", request)
        refused = isinstance(answer, Refusal) and answer.code is code
        expect(refused, f"Abort to be refused with {code.name}", brief(answer))


CASES: tuple[Case, ...] = (
    by_id_and_key,
    unknown,
    open_in_state,
    cancel_unknown,
    cancel_ended,
    cancel_drain,
    cancel_not_offered,
    deadline,
    model_named,
    abort_unknown,
)
