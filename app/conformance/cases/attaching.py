"""Observers come and go; the operation goes on."""

from __future__ import annotations

import asyncio

from app.conformance.case import Case, Need, case, expect
from app.conformance.cases.retries import same_events
from app.conformance.client import completed_of, ends_with
from app.conformance.orders import named
from app.conformance.record import kind_of
from app.conformance.traffic import expect_going_on
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

# The order may be on its way, being judged, or accepted by then; nothing was read of the answer.
_BEFORE_HANGING_UP_S = (0.0, 0.002, 0.01, 0.1)


@case(
    "attach.replay-from-first",
    "Calling again with the same key replays the operation from its first event to its end.",
)
async def replay(trial: Trial) -> None:
    request = trial.order()
    first = await trial.client.told(request)
    completed_of(first)
    again = await trial.client.told(request)
    expect(
        bool(again.events) and again.events[0].sequence == first.events[0].sequence,
        f"the replay to begin with sequence {first.events[0].sequence}",
        again,
    )
    expect(same_events(first, again), f"every event as it was told first: {first}", again)


@case(
    "attach.detach-goes-on",
    "A stream that its caller breaks off detaches that observer and nothing else: the operation"
    " goes on to its end, and takes effect.",
)
async def detach(trial: Trial) -> None:
    request = trial.order()
    stream = trial.client.send(request)
    first = await stream.first()
    stream.detach()
    operation = await trial.client.ended(first.operation_id)
    expect(
        operation.WhichOneof("outcome") == "completed",
        "the operation to complete after its observer has gone",
        operation.WhichOneof("outcome"),
    )
    if isinstance(request, pb.PauseRequest):
        found = (await trial.client.profile()).state.admission
        paused = found == pb.ADMISSION_STATE_PAUSED
        expect(paused, "admission PAUSED", named(pb.AdmissionState, found))


@case(
    "attach.detach-before-acceptance",
    "A caller that is gone before it has seen the acceptance finds out by its key what became of"
    " the order, and a retry carries it out at most once.",
)
async def vanish(trial: Trial) -> None:
    for delay_s in _BEFORE_HANGING_UP_S:
        before = await trial.client.profile()
        request = trial.order()
        stream = trial.client.send(request)
        await asyncio.sleep(delay_s)
        stream.detach()
        completed_of(await trial.client.told(request))
        raised = (await trial.client.profile()).pause_epoch - before.pause_epoch
        expect(raised <= 1, "at most one pause to take effect", f"the epoch rose by {raised}")
        await trial.settle()


@case(
    "attach.while-running",
    "Whoever attaches to a running operation hears it from the first event, and then hears the rest"
    " with everybody else.",
    Need.INFERENCE,
)
async def while_running(trial: Trial) -> None:
    key = trial.key()
    async with trial.draining(idempotency_key=key) as (stream, operation_id, generation):
        late = trial.connect().send(trial.orders.pause(pb.PAUSE_MODE_DRAIN, idempotency_key=key))
        first = await late.first()
        expect(first.operation_id == operation_id, f"operation {operation_id}", first.operation_id)
        expect(kind_of(first) == "accepted", "the accepted event first", kind_of(first))
        generation.hang_up()
        one, other = await asyncio.gather(stream.rest(), late.rest())
    completed_of(one)
    expect(same_events(one, other), f"both to hear the same: {one}", other)


@case(
    "attach.detach-while-running",
    "A drain whose observer has gone still waits for its requests, and then pauses.",
    Need.INFERENCE,
)
async def gone_while_running(trial: Trial) -> None:
    async with trial.draining() as (stream, operation_id, generation):
        stream.detach()
        await asyncio.sleep(0.2)
        operation = await trial.client.operation(operation_id=operation_id)
        expect(
            operation.WhichOneof("outcome") is None,
            "the operation to go on without an observer",
            f"it ended {operation.WhichOneof('outcome')}",
        )
        expect_going_on(generation)
        generation.hang_up()
        operation = await trial.client.ended(operation_id)
        ended = operation.WhichOneof("outcome")
        expect(ended == "completed", "the drain to complete", ended)


@case(
    "attach.rpc-deadline",
    "The deadline of the RPC ends the observation, not the operation.",
    Need.INFERENCE,
)
async def rpc_deadline(trial: Trial) -> None:
    key = trial.key()
    async with trial.draining(idempotency_key=key) as (stream, operation_id, generation):
        request = trial.orders.pause(pb.PAUSE_MODE_DRAIN, idempotency_key=key)
        brief = trial.client.send(request, timeout_s=0.3)
        told = await brief.rest()
        brief.told.detached = True
        trial.record.overlook()
        expect(not ends_with(told, "failed"), "the operation to go on", told)
        operation = await trial.client.operation(operation_id=operation_id)
        expect(operation.WhichOneof("outcome") is None, "the operation to go on", "it ended")
        generation.hang_up()
        completed_of(await stream.rest())


CASES: tuple[Case, ...] = (
    replay,
    detach,
    vanish,
    while_running,
    gone_while_running,
    rpc_deadline,
)
