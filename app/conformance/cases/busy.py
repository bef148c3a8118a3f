"""One exclusive order at a time, whoever gives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import brief, completed_of
from app.conformance.traffic import expect_going_on
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lora_pb2

NOT_FOUND = grpc.StatusCode.NOT_FOUND


@case(
    "busy.named",
    "While an exclusive operation runs, any other is ABORTED, to every client, with the id of the"
    " running one in ErrorInfo, and nothing is done.",
    Need.INFERENCE,
)
async def named(trial: Trial) -> None:
    async with trial.draining() as (stream, operation_id, generation):
        other = trial.connect()
        requests: list[Any] = [trial.orders.pause(mode) for mode in trial.profile.pause_modes]
        if trial.offers(pb.ADMIN_OPERATION_KIND_FLUSH_CACHES):
            requests.append(trial.flush())
        async with trial.unchanged("orders that were refused since the engine is busy"):
            for request in requests:
                refusal = await other.refused(request, grpc.StatusCode.ABORTED)
                expect(
                    operation_id in refusal.metadata.values(),
                    f"ErrorInfo to name the running operation {operation_id}",
                    f"{refusal.reason} {refusal.metadata}",
                )
        generation.hang_up()
        completed_of(await stream.rest())


@case(
    "busy.every-order",
    "While an exclusive operation runs, releases, updates, reconfigurations and the loading of"
    " adapters are ABORTED too.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def every_order(trial: Trial) -> None:
    orders: dict[Any, Callable[[], Any]] = {
        pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES: trial.orders.release,
        pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS: lambda: trial.orders.update("/nowhere"),
        pb.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING: lambda: trial.orders.reconfigure(
            max_running_requests=2
        ),
    }
    offered = [kind for kind in orders if trial.offers(kind)]
    adapters = trial.offers(pb.ADMIN_OPERATION_KIND_LOAD_LORA)
    if not offered and not adapters:
        raise NotPromised("the profile offers none of these orders")
    async with trial.draining() as (stream, _, generation):
        async with trial.unchanged("orders that were refused since the engine is busy"):
            for kind in offered:
                await trial.client.refused(orders[kind](), grpc.StatusCode.ABORTED)
            if adapters:
                adapter = lora_pb2.LoraAdapter(lora_name=trial.prefix, source_path="/nowhere")
                request = lora_pb2.LoadLoraRequest(adapter=adapter)
                answer = await trial.client.of_control("LoadLora", request)
                aborted = getattr(answer, "code", None) is grpc.StatusCode.ABORTED
                expect(aborted, "LoadLora to be ABORTED", brief(answer))
        generation.hang_up()
        completed_of(await stream.rest())


@case(
    "busy.reads-go-on",
    "Reads and retries are answered while an exclusive operation runs.",
    Need.INFERENCE,
)
async def reads(trial: Trial) -> None:
    async with trial.draining() as (stream, operation_id, generation):
        other = trial.connect()
        found = await other.operation(operation_id=operation_id)
        expect(found.WhichOneof("outcome") is None, "a running operation", brief(found))
        await other.profile()
        await other.refused(
            pb.GetAdminOperationRequest(operation_id=f"no-{trial.prefix}"), NOT_FOUND
        )
        generation.hang_up()
        completed_of(await stream.rest())


@case(
    "busy.resume-does-not-break-a-drain",
    "A resume does not break a running drain: it is refused with FAILED_PRECONDITION or ABORTED.",
    Need.INFERENCE,
)
async def resume(trial: Trial) -> None:
    async with trial.draining() as (stream, _, generation):
        epoch = (await trial.client.profile()).pause_epoch
        for given in {max(1, epoch), epoch + 1}:
            wanted = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)
            await trial.client.refused(trial.orders.resume(given), *wanted)
        expect_going_on(generation)
        generation.hang_up()
        completed_of(await stream.rest())


@case(
    "busy.two-at-once",
    "Of different orders that two clients give at the same time each is carried out or refused with"
    " ABORTED, and the pause epoch rises once for each pause that took effect.",
)
async def two_at_once(trial: Trial) -> None:
    trial.require_pauses()
    before = (await trial.client.profile()).pause_epoch
    other = trial.connect()
    await other.profile()  # connected, so that all set out together
    calls = await asyncio.gather(
        *(
            client.told(trial.orders.pause(mode, deadline_ms=50_000 + number))
            for mode in trial.profile.pause_modes
            for number, client in enumerate((trial.client, other, trial.client, other))
        )
    )
    raised = 0
    for told in calls:
        if told.refusal is not None:
            aborted = told.refusal.code is grpc.StatusCode.ABORTED and not told.events
            expect(aborted, "each order to complete or to be ABORTED", told)
        else:
            raised += completed_of(told).changed
    expect(raised > 0, "one order at least to be carried out", "none")
    after = (await trial.client.profile()).pause_epoch
    expect(after == before + raised, f"pause epoch {before + raised}", after)


CASES: tuple[Case, ...] = (named, every_order, reads, resume, two_at_once)
