"""What an update does to admission, to requests in flight, and when it is cut short."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import Stream, brief, completed_of, ends_with
from app.conformance.orders import named
from app.conformance.placing import Way
from app.conformance.record import kind_of
from app.conformance.traffic import Generation, TooShort, expect_going_on
from app.conformance.trial import IN_THE_MIDST_S, LONG_S, Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

DRAIN, ABORT, KEEP = pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_ABORT, pb.PAUSE_MODE_KEEP
WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION


def _update(trial: Trial, **fields: Any) -> pb.UpdateWeightsRequest:
    trial.stock.require(Way.DISK)
    return trial.orders.update(trial.stock.path, **fields)


def _around(trial: Trial, mode: pb.PauseMode.ValueType, **fields: Any) -> pb.UpdateWeightsRequest:
    trial.require_pauses(mode)
    return _update(trial, pause=pb.PauseAround(mode=mode), **fields)


@case(
    "update.under-pause",
    "An update under the caller's pause leaves that pause as it is; without one, or with another"
    " epoch than the latest, it is FAILED_PRECONDITION.",
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
)
async def under_pause(trial: Trial) -> None:
    trial.require_pauses()
    async with trial.unchanged("an update under a pause that is not there"):
        request = _update(trial, under_pause=pb.UnderPause())
        await trial.client.refused(request, WRONG_STATE)
    async with trial.paused():
        epoch = (await trial.client.profile()).pause_epoch
        async with trial.unchanged("an update under an earlier pause"):
            stale = pb.UnderPause(pause_epoch=epoch + 1)
            await trial.client.refused(_update(trial, under_pause=stale), WRONG_STATE)
        await _leaves_the_pause(trial, _update(trial, under_pause=pb.UnderPause(pause_epoch=epoch)))


@case(
    "update.leaves-a-pause",
    "An update that may pause by itself lifts only the pause that it made: one that was in force"
    " before stays in force.",
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
)
async def leaves_a_pause(trial: Trial) -> None:
    trial.require_pauses()
    async with trial.paused():
        await _leaves_the_pause(trial, _update(trial))


async def _leaves_the_pause(trial: Trial, request: pb.UpdateWeightsRequest) -> None:
    before = (await trial.client.profile()).state.pause
    await trial.client.completed(request)
    after = (await trial.client.profile()).state
    paused = named(pb.AdmissionState, after.admission)
    expect(after.admission == pb.ADMISSION_STATE_PAUSED, "admission PAUSED", paused)
    expect(after.pause.epoch == before.epoch, f"pause {before.epoch}", after.pause.epoch)


@asynccontextmanager
async def _in_the_midst(
    trial: Trial, request: pb.UpdateWeightsRequest, seconds: float
) -> AsyncGenerator[tuple[Stream, Generation]]:
    """An update that is sent while a request runs."""
    async with trial.traffic.running(seconds) as running:
        if running.end is not None:
            raise TooShort
        yield trial.client.send(request), running


async def _goes_to_its_end(trial: Trial, mode: pb.PauseMode.ValueType, when: str) -> None:
    """A request that runs when an update with that pause comes has all its tokens."""
    request = _around(trial, mode)
    async with _in_the_midst(trial, request, IN_THE_MIDST_S) as (stream, running):
        completed_of(await stream.rest())
        await running.over(trial.patience_s, when)
        expect(running.whole, "the request to finish by itself", running)
        expect(running.tokens >= running.asked, f"{running.asked} tokens in all", running)


@case(
    "update.drain-lets-finish",
    "An update with a drain lets the requests in flight finish.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
    Need.WEIGHTS,
)
async def drain(trial: Trial) -> None:
    await _goes_to_its_end(trial, DRAIN, "before the update completes")


@case(
    "update.abort-ends",
    "An update with ABORT ends the requests in flight, and tells them so.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
    Need.WEIGHTS,
)
async def abort(trial: Trial) -> None:
    request = _around(trial, ABORT)
    async with _in_the_midst(trial, request, LONG_S) as (stream, running):
        completed_of(await stream.rest())
        await running.over(trial.patience_s, "with the update")
        if running.whole:
            raise TooShort
        told = running.end in ("CANCELLED", "DRAINING")
        expect(told, "the request to be told that it was cancelled", running)


@case(
    "update.keep-continues",
    "An update with KEEP freezes the requests in flight, and then continues them to their end.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
    Need.WEIGHTS,
)
async def keep(trial: Trial) -> None:
    await _goes_to_its_end(trial, KEEP, "after the update")


async def _as_before(trial: Trial, before: pb.AdminState, running: Generation) -> None:
    after = (await trial.client.profile()).state
    for name, wanted, found in (
        ("weights", before.weights, after.weights),
        ("admission", before.admission, after.admission),
    ):
        expect(wanted == found, f"{name} {brief(wanted)} as before", brief(found))
    expect_going_on(running)


@case(
    "update.deadline",
    "An update that waits for a drain beyond its deadline fails with DEADLINE_EXCEEDED; the old"
    " weights serve on, and admission opens again.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
    Need.WEIGHTS,
)
async def deadline(trial: Trial) -> None:
    request = _around(trial, DRAIN, deadline_ms=1_500)
    before = (await trial.client.profile()).state
    async with _in_the_midst(trial, request, LONG_S) as (stream, running):
        told = await stream.rest()
        expect(ends_with(told, "failed"), "the update to fail at its deadline", told)
        code = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        failed = told.events[-1].failed
        expect(failed.code == code, f"code {code} (DEADLINE_EXCEEDED)", brief(failed))
        await _as_before(trial, before, running)


@case(
    "update.cancel",
    "Where an update is offered as cancellable, one that waits for a drain ends cancelled when it"
    " is asked to; the old weights serve on, and admission opens again.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
    Need.WEIGHTS,
)
async def cancel(trial: Trial) -> None:
    request = _around(trial, DRAIN)
    if not any(
        support.kind == pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS and support.cancellable
        for support in trial.profile.operations
    ):
        raise NotPromised("the profile does not offer to cancel an update")
    before = (await trial.client.profile()).state
    async with _in_the_midst(trial, request, LONG_S) as (stream, running):
        first = await stream.first()
        await trial.until_draining(running)
        await trial.client.answered(pb.CancelAdminOperationRequest(operation_id=first.operation_id))
        told = await stream.rest()
        expect(ends_with(told, "cancelled"), "the update to end cancelled", told)
        await _as_before(trial, before, running)


@case(
    "update.counts-since-flush",
    "Updates that keep the cache are counted until one flushes it, and each of them warns.",
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
)
async def counts(trial: Trial) -> None:
    offered = trial.profile.cache_policies
    for policy in (pb.CACHE_POLICY_FLUSH, pb.CACHE_POLICY_KEEP):
        if policy not in offered:
            name = named(pb.CachePolicy, policy)
            raise NotPromised(f"the profile does not offer cache policy {name}")
    for policy, wanted in (
        (pb.CACHE_POLICY_FLUSH, 0),
        (pb.CACHE_POLICY_KEEP, 1),
        (pb.CACHE_POLICY_KEEP, 2),
        (pb.CACHE_POLICY_FLUSH, 0),
    ):
        told = await trial.client.told(_update(trial, cache_policy=policy))
        result = completed_of(told).update_weights
        stated = (await trial.client.profile()).state.weights.updates_since_flush
        counted = (result.updates_since_flush, stated)
        expect(counted == (wanted, wanted), f"{wanted} in result and state", counted)
        warned = any(kind_of(event) == "warning" for event in told.events)
        expect(warned or not wanted, "a warning that the cache was kept", told)


CASES: tuple[Case, ...] = (
    under_pause,
    leaves_a_pause,
    drain,
    abort,
    keep,
    deadline,
    cancel,
    counts,
)
