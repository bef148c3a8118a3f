"""The profile is the truth: what it does not offer is not there, and what it offers is."""

from __future__ import annotations

import grpc

from app.conformance.case import Case, NotPromised, case, expect
from app.conformance.client import UNARY
from app.conformance.orders import STREAMED, name_of
from app.conformance.record import Refusal
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lora_pb2

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
_OPERATIONS = (*STREAMED, pb.ADMIN_OPERATION_KIND_PROFILE)


@case(
    "unsupported.operations",
    "An operation that the profile does not offer is UNIMPLEMENTED, however well-formed the order,"
    " and nothing is changed.",
)
async def operations(trial: Trial) -> None:
    absent = [kind for kind in _OPERATIONS if not trial.offers(kind)]
    if not absent:
        raise NotPromised("the profile offers every operation")
    for kind in absent:
        async with trial.unchanged(f"{name_of(kind)}, which is not offered"):
            await trial.client.refused(trial.orders.whole(kind), UNIMPLEMENTED)


@case(
    "unsupported.stop-profile",
    "Where profiling is not offered, stopping a profile is UNIMPLEMENTED too.",
)
async def stop_profile(trial: Trial) -> None:
    if trial.offers(pb.ADMIN_OPERATION_KIND_PROFILE):
        raise NotPromised("the profile offers profiling")
    async with trial.unchanged("stop_profile, which is not offered"):
        await trial.client.refused(trial.orders.stop_profile("profile"), UNIMPLEMENTED)


@case(
    "unsupported.adapters",
    "Loading and unloading adapters is UNIMPLEMENTED where the profile does not offer it.",
)
async def adapters(trial: Trial) -> None:
    requests = {
        pb.ADMIN_OPERATION_KIND_LOAD_LORA: (
            "LoadLora",
            lora_pb2.LoadLoraRequest(
                adapter=lora_pb2.LoraAdapter(
                    lora_id=1, lora_name=trial.prefix, source_path="/nowhere"
                )
            ),
        ),
        pb.ADMIN_OPERATION_KIND_UNLOAD_LORA: (
            "UnloadLora",
            lora_pb2.UnloadLoraRequest(lora_name=trial.prefix),
        ),
    }
    absent = {kind: asked for kind, asked in requests.items() if not trial.offers(kind)}
    if not absent:
        raise NotPromised("the profile offers adapters")
    for kind, (method, request) in absent.items():
        async with trial.unchanged(f"{name_of(kind)}, which is not offered"):
            answer = await trial.client.of_control(method, request)
            refused = isinstance(answer, Refusal) and answer.code is UNIMPLEMENTED
            expect(refused, f"{method} to be UNIMPLEMENTED", answer)


@case(
    "unsupported.offered-is-known",
    "An operation that the profile offers is never UNIMPLEMENTED: an order of it without a key is"
    " INVALID_ARGUMENT.",
)
async def offered_is_known(trial: Trial) -> None:
    for kind in _OPERATIONS:
        if not trial.offers(kind):
            continue
        request = trial.orders.whole(kind)
        request.idempotency_key = ""
        assert type(request) in UNARY or kind in STREAMED
        async with trial.unchanged(f"{name_of(kind)} without a key"):
            await trial.client.refused(request, grpc.StatusCode.INVALID_ARGUMENT)


CASES: tuple[Case, ...] = (operations, stop_profile, adapters, offered_is_known)
