"""What the inference listener has of administration: reading, and ending one's own requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc

from app.conformance.case import Case, Need, case, expect
from app.conformance.client import Client, brief
from app.conformance.record import Refusal
from app.conformance.traffic import expect_going_on
from app.conformance.trial import IN_THE_MIDST_S, Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lifecycle_pb2, lora_pb2, server_pb2

_KEPT_BACK = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
_ABORTED = lifecycle_pb2.AbortStatus.ABORT_STATUS_ABORTED


@asynccontextmanager
async def _inference(trial: Trial) -> AsyncGenerator[Client]:
    assert trial.options.inference is not None
    client = Client(trial.options.inference, trial.record, trial.patience_s)
    heard = len(trial.record.refusals)
    try:
        yield client
    finally:
        # A service that is not there refuses in words of the transport's, as it should.
        del trial.record.refusals[heard:]
        await client.close()


def _kept_back(answer: object) -> bool:
    return isinstance(answer, Refusal) and answer.code in _KEPT_BACK


@case(
    "listener.no-orders",
    "The inference listener takes no orders and does not show the administrative state.",
    Need.INFERENCE,
)
async def no_orders(trial: Trial) -> None:
    async with _inference(trial) as client, trial.unchanged("an order on the inference listener"):
        answer = await client.ask(pb.GetAdminProfileRequest())
        expect(_kept_back(answer), "GetAdminProfile to be refused", brief(answer))
        told = await client.told(trial.order())
        expect(_kept_back(told.refusal) and not told.events, "an order to be refused", told)


@case(
    "listener.reads",
    "The inference listener answers discovery, and names the same instance as the admin listener.",
    Need.INFERENCE,
)
async def reads(trial: Trial) -> None:
    instance = (await trial.client.profile()).instance_id
    async with _inference(trial) as client:
        answer = await client.of_control("GetServerInfo", server_pb2.GetServerInfoRequest())
        found = getattr(answer, "instance_id", None)
        expect(found == instance, f"instance {instance}", found or brief(answer))


@case(
    "listener.abort-own",
    "On the inference listener a caller can end a request of its own by its id.",
    Need.INFERENCE,
)
async def abort_own(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_ABORT_REQUESTS)
    async with _inference(trial) as client, trial.traffic.running(10 * IN_THE_MIDST_S) as mine:
        request = lifecycle_pb2.AbortRequest(request_id=mine.request_id)
        answer = await client.of_control("Abort", request)
        aborted = getattr(answer, "status", None) == _ABORTED
        expect(aborted, "ABORT_STATUS_ABORTED", brief(answer))
        await mine.over(trial.patience_s, "when it is aborted")
        expect(mine.end == "CANCELLED", "the request to be told CANCELLED", mine)


@case(
    "listener.no-abort-of-all",
    "On the inference listener nobody can end all requests: they go on.",
    Need.INFERENCE,
)
async def no_abort_of_all(trial: Trial) -> None:
    async with _inference(trial) as client, trial.traffic.running(10 * IN_THE_MIDST_S) as running:
        everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        answer = await client.of_control("Abort", everything)
        expect(_kept_back(answer), "Abort of all requests to be refused", brief(answer))
        expect_going_on(running)


@case(
    "listener.no-adapters",
    "On the inference listener nobody can load or unload adapters.",
    Need.INFERENCE,
)
async def no_adapters(trial: Trial) -> None:
    adapter = lora_pb2.LoraAdapter(lora_id=1, lora_name=trial.prefix, source_path="/nowhere")
    async with _inference(trial) as client, trial.unchanged("adapters of the inference listener"):
        for method, request in (
            ("LoadLora", lora_pb2.LoadLoraRequest(adapter=adapter)),
            ("UnloadLora", lora_pb2.UnloadLoraRequest(lora_name=trial.prefix)),
        ):
            answer = await client.of_control(method, request)
            expect(_kept_back(answer), f"{method} to be refused", brief(answer))


CASES: tuple[Case, ...] = (no_orders, reads, abort_own, no_abort_of_all, no_adapters)
