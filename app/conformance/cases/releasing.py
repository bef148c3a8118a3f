"""What a release does to admission, to requests in flight, and to what it lets go of."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.cases.resources import reopened, restorable
from app.conformance.client import brief, described, ends_with
from app.conformance.orders import named
from app.conformance.traffic import Generation, TooShort, expect_going_on
from app.conformance.trial import IN_THE_MIDST_S, LONG_S, Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lifecycle_pb2

INFERENCE, ADMIN = "openengine.v1.Inference", "openengine.v1.OpenEngineAdmin"
WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION
WEIGHTS, DISCARD = pb.RESOURCE_KIND_WEIGHTS, pb.CONTENT_POLICY_DISCARD
_NOT_READY = lifecycle_pb2.HealthState.HEALTH_STATE_NOT_READY


async def _restored(trial: Trial, *kinds: Any) -> None:
    epoch = (await trial.client.profile()).release_epoch
    await trial.client.completed(trial.orders.restore(epoch, resources=list(kinds)))


@case(
    "release.closes-admission",
    "A release of an engine that is open closes its admission under a pause, which the restore"
    " leaves in force.",
    Need.DESTRUCTIVE,
)
async def closes(trial: Trial) -> None:
    kind, policy = restorable(trial)[0]
    before = (await trial.client.profile()).pause_epoch
    await trial.client.completed(trial.orders.release(resources=[kind], content=policy))
    for when in ("after the release", "after the restore"):
        profile = await trial.client.profile()
        paused = profile.state.admission == pb.ADMISSION_STATE_PAUSED
        expect(paused, f"admission PAUSED {when}", brief(profile.state))
        expect(profile.pause_epoch > before, f"a pause epoch above {before}", profile.pause_epoch)
        if profile.state.released:
            await _restored(trial, kind)
    await trial.resumed()


@case(
    "release.staged",
    "What is released is a set that grows and shrinks by what each order names; the engine does not"
    " serve before it is empty.",
    Need.DESTRUCTIVE,
)
async def staged(trial: Trial) -> None:
    policies = dict(restorable(trial))
    if len(policies) < 2:
        raise NotPromised("the profile offers fewer than two resources to restore")
    held: list[Any] = []
    for kind, policy in policies.items():
        order = trial.orders.release(resources=[kind], content=policy)
        told = (await trial.client.completed(order)).release_resources
        held.append(kind)
        await _holds(trial, held, told.released)
    for kind in policies:
        epoch = (await trial.client.profile()).release_epoch
        restore = trial.orders.restore(epoch, resources=[kind])
        restored = (await trial.client.completed(restore)).restore_resources
        held.remove(kind)
        await _holds(trial, held, restored.released)
        if held:
            epoch = (await trial.client.profile()).pause_epoch
            await trial.client.refused(trial.orders.resume(epoch), WRONG_STATE)
    await reopened(trial)


async def _holds(trial: Trial, held: list[Any], told: Any) -> None:
    names = sorted(named(pb.ResourceKind, kind) for kind in held)
    state = (await trial.client.profile()).state.released
    for where, found in (("state", state), ("result", told)):
        seen = sorted(named(pb.ResourceKind, kind) for kind in found)
        expect(seen == names, f"released to be {names} in the {where}", seen)


@case(
    "release.health",
    "While anything is released, the Inference service is NOT_SERVING and core Health NOT_READY;"
    ' OpenEngineAdmin and "" are SERVING.',
    Need.DESTRUCTIVE,
)
async def health(trial: Trial) -> None:
    kind, policy = restorable(trial)[0]
    await trial.client.completed(trial.orders.release(resources=[kind], content=policy))
    for service, wanted in ((INFERENCE, "NOT_SERVING"), (ADMIN, "SERVING"), ("", "SERVING")):
        found = await trial.client.health(service)
        expect(found == wanted, f'health of "{service}" to be {wanted}', found)
    core = await trial.client.of_control("Health", lifecycle_pb2.HealthRequest())
    state = getattr(core, "state", None)
    expect(state == _NOT_READY, "core Health NOT_READY", brief(core))
    await _restored(trial, kind)
    await reopened(trial)


@asynccontextmanager
async def _running(
    trial: Trial, rule: pb.DrainRule.ValueType, seconds: float
) -> AsyncGenerator[tuple[Generation, pb.ReleaseResourcesRequest]]:
    """A request in flight, and a release with that rule for it."""
    kind, policy = restorable(trial)[0]
    if rule not in trial.profile.drain_rules:
        name = named(pb.DrainRule, rule).removeprefix("DRAIN_RULE_").lower()
        raise NotPromised(f"the profile does not offer drain rule {name}")
    async with trial.traffic.running(seconds) as running:
        if running.end is not None:
            raise TooShort
        yield running, trial.orders.release(resources=[kind], content=policy, drain=rule)


@case(
    "release.waits",
    "A release with WAIT lets the requests in flight finish before it takes anything.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def waits(trial: Trial) -> None:
    """One that is over before the release comes to it proves nothing; then a longer one may."""
    counted = (0, 0)
    for seconds in (IN_THE_MIDST_S, 4 * IN_THE_MIDST_S, 10 * IN_THE_MIDST_S):
        async with _running(trial, pb.DRAIN_RULE_WAIT, seconds) as (running, order):
            completed = await trial.client.completed(order)
            await running.over(trial.patience_s, "before the release completes")
            expect(running.whole, "the request to finish by itself", running)
        result = completed.release_resources
        counted = (result.requests_finished, result.requests_aborted)
        if counted != (0, 0):
            break
        await _restored(trial, restorable(trial)[0][0])
        await reopened(trial)
    expect(counted == (1, 0), "1 request finished, 0 aborted", f"{counted}")


@case(
    "release.aborts",
    "A release with ABORT ends the requests in flight, tells them so, and counts them.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def aborts(trial: Trial) -> None:
    async with _running(trial, pb.DRAIN_RULE_ABORT, LONG_S) as (running, order):
        completed = await trial.client.completed(order)
        await running.over(trial.patience_s, "with the release")
        if running.whole:
            raise TooShort
        told = running.end in ("CANCELLED", "DRAINING")
        expect(told, "the request to be told that it was cancelled", running)
        ended = completed.release_resources.requests_aborted
        expect(ended == 1, "1 request aborted", ended)


@case(
    "release.refuses",
    "A release with REFUSE takes nothing while a request is in flight, which goes on.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def refuses(trial: Trial) -> None:
    async with _running(trial, pb.DRAIN_RULE_REFUSE, LONG_S) as (running, order):
        before = (await trial.client.profile()).state
        told = await trial.client.told(order)
        code = WRONG_STATE.value[0]
        refused = told.refusal is not None and told.refusal.code is WRONG_STATE
        failed = ends_with(told, "failed") and told.events[-1].failed.code == code
        expect(refused or failed, "FAILED_PRECONDITION", described(told))
        after = (await trial.client.profile()).state
        same = (before.released, before.admission) == (after.released, after.admission)
        expect(same, f"nothing released and admission as before: {brief(before)}", brief(after))
        expect_going_on(running)


@case(
    "release.discard-under-keep",
    "While a KEEP pause has frozen requests, a release with DISCARD is FAILED_PRECONDITION: what"
    " they have computed is not thrown away under them.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def discard_under_keep(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES)
    trial.require_pauses(pb.PAUSE_MODE_KEEP)
    kinds = [one.kind for one in trial.profile.resources if DISCARD in one.content]
    if not kinds:
        raise NotPromised("the profile offers no release that discards")
    async with trial.traffic.running(LONG_S) as running:
        await trial.client.completed(trial.orders.pause(pb.PAUSE_MODE_KEEP))
        if running.end is not None:
            raise TooShort
        for kind in kinds:
            order = trial.orders.release(resources=[kind], content=DISCARD)
            async with trial.unchanged("a release that would discard what is frozen"):
                await trial.client.refused(order, WRONG_STATE)
        await trial.resumed()
        expect_going_on(running)


@case(
    "release.discarded-weights",
    "Weights that were discarded are MISSING, also after the restore, and admission cannot be"
    " opened; a successful update, and nothing else, makes them valid.",
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
)
async def discarded_weights(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES)
    offered = [one for one in trial.profile.resources if one.kind == WEIGHTS]
    if not offered or DISCARD not in offered[0].content:
        raise NotPromised("the profile does not offer to discard weights")
    order = trial.orders.release(resources=[WEIGHTS], content=DISCARD)
    await trial.client.completed(order)
    await _restored(trial, WEIGHTS)
    state = (await trial.client.profile()).state
    missing = state.weights.state == pb.WEIGHTS_STATE_MISSING
    expect(missing, "weights MISSING", named(pb.WeightsState, state.weights.state))
    epoch = (await trial.client.profile()).pause_epoch
    async with trial.unchanged("a resume without weights"):
        await trial.client.refused(trial.orders.resume(epoch), WRONG_STATE)
    under = pb.UnderPause(pause_epoch=epoch)
    await trial.stock.loaded(trial.orders.update(trial.stock.path, under_pause=under))
    await trial.resumed()
    found = await trial.client.health(INFERENCE)
    expect(found == "SERVING", "Inference SERVING after update and resume", found)


CASES: tuple[Case, ...] = (
    closes,
    staged,
    health,
    waits,
    aborts,
    refuses,
    discard_under_keep,
    discarded_weights,
)
