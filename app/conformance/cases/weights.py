"""Updating weights: on all ranks or on none."""

from __future__ import annotations

from app.conformance.case import Case, Need, NotApplicable, case, expect
from app.conformance.client import brief, described, ends_with
from app.conformance.orders import named
from app.conformance.record import Told
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

_OUTSIDE = ("/", "/etc", "/proc/self", "/nowhere/../etc")


def _require(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS)
    if pb.WEIGHT_SOURCE_KIND_DISK not in trial.profile.weight_sources:
        raise NotApplicable("the profile does not offer updates from disk")


async def _turned_away(trial: Trial, request: pb.UpdateWeightsRequest) -> Told:
    """Refused or failed, and either way with the weights as they were."""
    before = (await trial.client.profile()).state
    told = await trial.client.told(request)
    failed = told.refusal is not None or ends_with(told, "failed")
    expect(failed, "the update to be refused or to fail", described(told))
    after = (await trial.client.profile()).state
    as_before = after.weights == before.weights
    expect(as_before, f"weights {brief(before.weights)}", brief(after.weights))
    expect(
        after.admission == before.admission,
        f"admission {named(pb.AdmissionState, before.admission)} as before",
        named(pb.AdmissionState, after.admission),
    )
    return told


@case(
    "update.nowhere",
    "An update from a place that does not exist is refused or fails; weights, version and admission"
    " are as before, and the failure says that nothing was changed.",
    Need.DESTRUCTIVE,
)
async def nowhere(trial: Trial) -> None:
    _require(trial)
    told = await _turned_away(trial, trial.orders.update(f"/nowhere/{trial.prefix}"))
    if told.events:
        harmless = (pb.FAILURE_EFFECT_NONE, pb.FAILURE_EFFECT_ROLLED_BACK)
        effect = told.events[-1].failed.effect
        expect(effect in harmless, "effect NONE or ROLLED_BACK", named(pb.FailureEffect, effect))


@case(
    "update.allowed-roots",
    "Only paths below the engine's allowed roots are read: any other is refused or fails, whatever"
    " lies there.",
    Need.DESTRUCTIVE,
)
async def allowed_roots(trial: Trial) -> None:
    _require(trial)
    for path in _OUTSIDE:
        await _turned_away(trial, trial.orders.update(path))


@case(
    "update.version-moves-with-success",
    "A successful update moves the version, tells the one before, brings evidence from every rank,"
    " and opens admission again if it was open.",
    Need.DESTRUCTIVE,
)
async def version(trial: Trial) -> None:
    _require(trial)
    path = trial.options.weights
    if path is None:
        raise NotApplicable("needs --weights PATH, which the engine can load from disk")
    before = await trial.client.profile()
    request = trial.orders.update(path, weight_version=f"{trial.prefix}-weights")
    completed = await trial.client.completed(request)
    after = await trial.client.profile()
    result = completed.update_weights
    for name, wanted, found in (
        ("version", request.weight_version, after.state.weights.version),
        ("told version", request.weight_version, result.weight_version),
        ("version before", before.state.weights.version, result.previous_weight_version),
        ("weights", pb.WEIGHTS_STATE_VALID, after.state.weights.state),
        ("admission", before.state.admission, after.state.admission),
    ):
        expect(wanted == found, f"{name} {wanted}", found)
    ranks = sorted(evidence.rank for evidence in result.evidence)
    wanted_ranks = list(range(after.world_size))
    expect(ranks == wanted_ranks, f"evidence of ranks {wanted_ranks}", ranks)
    whole = all(len(one.sha256) == 32 and one.tensors and one.bytes for one in result.evidence)
    expect(whole, "tensors, bytes and SHA-256 of each rank", brief(result))


@case(
    "update.damaged",
    "An update whose digest does not match is refused or rolled back on every rank.",
    Need.DESTRUCTIVE,
)
async def damaged(trial: Trial) -> None:
    _require(trial)
    path = trial.options.weights
    if path is None:
        raise NotApplicable("needs --weights PATH, which the engine can load from disk")
    wrong = pb.FileDigest(name="model.safetensors", sha256=bytes(32))
    request = trial.orders.update(path, disk=pb.DiskWeights(path=path, digests=[wrong]))
    await _turned_away(trial, request)


CASES: tuple[Case, ...] = (nowhere, allowed_roots, version, damaged)
