"""Who may give orders, and what becomes of what they show."""

from __future__ import annotations

import grpc

from app.conformance.case import Case, Need, NotApplicable, NotGiven, case, expect
from app.conformance.client import brief
from app.conformance.connection import Metadata, bearer
from app.conformance.record import Refusal
from app.conformance.tampering import forgeries
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lifecycle_pb2

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
_DENIED = (UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


async def _kept_out(
    trial: Trial, metadata: Metadata, *codes: grpc.StatusCode, label: str = ""
) -> None:
    """Neither a read nor an order is served with that, nor anything of Control but health."""
    wanted = " or ".join(code.name for code in codes) + (f" with the token {label}" * bool(label))
    async with trial.unchanged("calls without a valid credential"):
        answer = await trial.client.ask(pb.GetAdminProfileRequest(), metadata=metadata)
        refused = isinstance(answer, Refusal) and answer.code in codes
        expect(refused, f"GetAdminProfile to be {wanted}", brief(answer))
        told = await trial.client.send(trial.order(), metadata=metadata).rest()
        refused = told.refusal is not None and told.refusal.code in codes and not told.events
        expect(refused, f"an order to be {wanted}", told)
        everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        answer = await trial.client.of_control("Abort", everything, metadata=metadata)
        refused = isinstance(answer, Refusal) and answer.code in codes
        expect(refused, f"Abort to be {wanted}", brief(answer))


@case(
    "credentials.required",
    "Without a token, or with one that is none, every call is UNAUTHENTICATED and nothing is done.",
    Need.CREDENTIAL,
)
async def required(trial: Trial) -> None:
    for metadata in ((), bearer("no.such.token"), (("authorization", "Basic bm86"),)):
        await _kept_out(trial, metadata, UNAUTHENTICATED)


@case(
    "credentials.forged",
    "A token that was tampered with is UNAUTHENTICATED: without a signature (alg none), with"
    " another one, with other claims under the same one, or cut off.",
    Need.CREDENTIAL,
)
async def forged(trial: Trial) -> None:
    """Made of the token that was given."""
    token = trial.options.admin.token
    assert token is not None, "the case did not say that it needs it"
    try:
        counterfeits = forgeries(token)
    except ValueError as unfit:
        raise NotApplicable("the token is no signed JWT that could be tampered with") from unfit
    for counterfeit in counterfeits:
        await _kept_out(trial, bearer(counterfeit), UNAUTHENTICATED)


@case(
    "credentials.refused",
    "A token that must not be taken (expired, for another audience, of another issuer) opens"
    " nothing on the admin listener.",
    Need.REFUSED,
)
async def refused(trial: Trial) -> None:
    for label, token in trial.options.refused_tokens:
        await _kept_out(trial, bearer(token), *_DENIED, label=label)


@case(
    "credentials.inference-required",
    "Without a token, or with one that is none, no request is served and none is ended.",
    Need.INFERENCE,
)
async def inference_required(trial: Trial) -> None:
    assert trial.options.inference is not None
    if trial.options.inference.token is None:
        raise NotGiven("no inference token was given: no credential is in play there")
    for metadata in ((), bearer("no.such.token")):
        asked = trial.traffic.ask(4, metadata=metadata)
        await asked.over(trial.patience_s, "without a valid credential")
        code = asked.refusal.code if asked.refusal else None
        out = code is UNAUTHENTICATED and not asked.tokens
        expect(out, "a request to be UNAUTHENTICATED", asked)


@case(
    "credentials.of-inference",
    "A token for inference opens nothing on the admin listener.",
    Need.CREDENTIAL,
    Need.INFERENCE,
)
async def of_inference(trial: Trial) -> None:
    assert trial.options.inference is not None
    token = trial.options.inference.token
    if token is None or token == trial.options.admin.token:
        raise NotGiven("no inference token of its own was given")
    await _kept_out(trial, bearer(token), *_DENIED)


@case(
    "credentials.not-echoed",
    "No credential comes back: not in a message, an error or a trailer.",
)
async def not_echoed(trial: Trial) -> None:
    """All that was heard in the whole run is looked through, and this is added to it."""
    for metadata in (bearer(trial.canary), (("x-api-key", trial.canary),)):
        shown = (*trial.options.admin.metadata, *metadata)
        for given in (metadata, shown if len(shown) > len(metadata) else metadata):
            await trial.client.ask(pb.GetAdminProfileRequest(), metadata=given)
            await trial.client.send(trial.order(), metadata=given).rest()
            refused = trial.order(expected_revision=trial.profile.revision + 1_000_000)
            await trial.client.send(refused, metadata=given).rest()
    await trial.client.told(trial.order())
    echoes = sorted(set(trial.record.echoes))
    expect(not echoes, "no credential in anything the engine says", ", ".join(echoes))


CASES: tuple[Case, ...] = (
    required,
    forged,
    refused,
    of_inference,
    inference_required,
    not_echoed,
)
