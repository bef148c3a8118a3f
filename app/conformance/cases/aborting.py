"""Ending requests through the core Control service on the admin listener."""

from __future__ import annotations

from app.conformance.case import Case, Need, case, expect
from app.conformance.client import brief
from app.conformance.orders import named
from app.conformance.record import Refusal
from app.conformance.traffic import TooShort, expect_going_on
from app.conformance.trial import IN_THE_MIDST_S, Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lifecycle_pb2

_S = lifecycle_pb2.AbortStatus


async def _abort(trial: Trial, request: lifecycle_pb2.AbortRequest, status: int) -> None:
    answer = await trial.client.of_control("Abort", request)
    fits = not isinstance(answer, Refusal) and answer.status == status
    expect(fits, f"status {named(_S, status)}", brief(answer))


@case(
    "abort.one",
    "Aborting a request by its id ends that one, tells it so, and leaves the others alone; asking"
    " again says that it has ended already.",
    Need.INFERENCE,
)
async def one(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_ABORT_REQUESTS)
    seconds = IN_THE_MIDST_S * 10
    async with trial.traffic.running(seconds) as first, trial.traffic.running(seconds) as other:
        if first.end is not None:
            raise TooShort
        request = lifecycle_pb2.AbortRequest(request_id=first.request_id)
        await _abort(trial, request, _S.ABORT_STATUS_ABORTED)
        await first.over(trial.patience_s, "when it is aborted")
        expect(first.end == "CANCELLED", "the request to be told CANCELLED", first)
        expect_going_on(other)
        await _abort(trial, request, _S.ABORT_STATUS_ALREADY_FINISHED)


@case(
    "abort.beside-a-drain",
    "Requests can be aborted while a drain waits for them; the drain then completes.",
    Need.INFERENCE,
)
async def beside_a_drain(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_ABORT_REQUESTS)
    async with trial.draining() as (stream, _, generation):
        request = lifecycle_pb2.AbortRequest(request_id=generation.request_id)
        await _abort(trial, request, _S.ABORT_STATUS_ABORTED)
        told = await stream.rest()
        expect(told.events[-1].HasField("completed"), "the drain to complete", told)


@case(
    "abort.all",
    "Aborting all requests, said on purpose, ends every one that is in flight.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def all_of_them(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_ABORT_REQUESTS)
    seconds = IN_THE_MIDST_S * 10
    async with trial.traffic.running(seconds) as first, trial.traffic.running(seconds) as other:
        if first.end is not None:
            raise TooShort
        everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        await _abort(trial, everything, _S.ABORT_STATUS_ABORTED)
        for generation in (first, other):
            await generation.over(trial.patience_s, "when all are aborted")
            expect(generation.end == "CANCELLED", "each to be told CANCELLED", generation)


CASES: tuple[Case, ...] = (one, beside_a_drain, all_of_them)
