"""What an engine still knows in its next life."""

from __future__ import annotations

import grpc

from app.conformance.case import Case, Need, case, expect
from app.conformance.client import brief, completed_of, ends_with
from app.conformance.orders import named
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

_UNKNOWN = pb.FAILURE_EFFECT_UNKNOWN


@case(
    "restart.new-instance",
    "A restart is a new instance whose revision and epochs have risen, and none of which has gone"
    " back.",
    Need.HOOK,
)
async def new_instance(trial: Trial) -> None:
    before = await trial.client.profile()
    after = await trial.restart()
    expect(after.instance_id != before.instance_id, "another instance id", after.instance_id)
    expect(after.revision > before.revision, f"a revision above {before.revision}", after.revision)
    for name in ("pause_epoch", "release_epoch"):
        was, now = getattr(before, name), getattr(after, name)
        expect(now > was, f"{name} above {was}", now)


@case(
    "restart.keys-are-kept",
    "After a restart the key of an ended operation still stands for it: a retry replays it, another"
    " payload is ALREADY_EXISTS, and it is found by id and key.",
    Need.HOOK,
)
async def keys_kept(trial: Trial) -> None:
    request = trial.order(deadline_ms=50_000)
    told = await trial.client.told(request)
    completed_of(told)
    operation_id = told.events[0].operation_id
    before = await trial.client.operation(operation_id=operation_id)
    if isinstance(request, pb.PauseRequest):
        await trial.resumed()
    await trial.restart()
    by_key = await trial.client.operation(idempotency_key=request.idempotency_key)
    by_id = await trial.client.operation(operation_id=operation_id)
    expect(by_id == before, f"the operation as it ended: {brief(before)}", brief(by_id))
    expect(by_key == before, f"the same by its key: {brief(before)}", brief(by_key))
    async with trial.unchanged("a retry after a restart"):
        again = await trial.client.told(request)
        expect(again.events == told.events, f"the events as before: {told}", again)
        request.deadline_ms = 51_000
        await trial.client.refused(request, grpc.StatusCode.ALREADY_EXISTS)


@case(
    "restart.fences",
    "Orders that were meant for an earlier life are refused: its revision is ABORTED, its pause"
    " epoch FAILED_PRECONDITION.",
    Need.HOOK,
)
async def fences(trial: Trial) -> None:
    async with trial.paused():
        pass
    before = await trial.client.profile()
    await trial.restart()
    async with trial.unchanged("orders for an earlier life"):
        stale = trial.order(expected_revision=before.revision)
        await trial.client.refused(stale, grpc.StatusCode.ABORTED)
    async with trial.paused(), trial.unchanged("a resume for an earlier life"):
        stale = trial.orders.resume(before.pause_epoch)
        await trial.client.refused(stale, grpc.StatusCode.FAILED_PRECONDITION)


@case(
    "restart.open-operation",
    "An operation that a restart cuts off ends failed with ENGINE_RESTARTED, its effect stated as"
    " unknown; no retry carries it out again.",
    Need.HOOK,
    Need.INFERENCE,
)
async def open_operation(trial: Trial) -> None:
    key = trial.key()
    async with trial.draining(idempotency_key=key) as (_, operation_id, _):
        await trial.restart()
    found = await trial.client.operation(operation_id=operation_id)
    expect(found.WhichOneof("outcome") == "failed", "the operation to have failed", brief(found))
    failed = found.failed
    expect(failed.reason == "ENGINE_RESTARTED", "reason ENGINE_RESTARTED", brief(failed))
    expect(failed.effect == _UNKNOWN, "effect UNKNOWN", named(pb.FailureEffect, failed.effect))
    async with trial.unchanged("a retry of what a restart cut off"):
        request = trial.orders.pause(pb.PAUSE_MODE_DRAIN, idempotency_key=key)
        told = await trial.client.told(request)
        expect(ends_with(told, "failed"), "the retry to tell the same end", told)


@case("restart.serves", "After a restart the engine takes orders again, under new ids.", Need.HOOK)
async def serves(trial: Trial) -> None:
    first = await trial.client.told(trial.order())
    completed_of(first)
    await trial.restart()
    await trial.settle()
    second = await trial.client.told(trial.order())
    completed_of(second)
    fresh = first.events[0].operation_id != second.events[0].operation_id
    expect(fresh, "a new operation id", second.events[0].operation_id)


CASES: tuple[Case, ...] = (new_instance, keys_kept, fences, open_operation, serves)
