"""Releasing and restoring what an engine holds. All but the refusals are destructive."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import brief
from app.conformance.orders import named
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

_TOKENS = 16
WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION


def restorable(trial: Trial) -> list[tuple[Any, Any]]:
    """Resources with the policies after which restoring alone brings the engine back: weights
    that were discarded need an update."""
    trial.require(
        pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES, pb.ADMIN_OPERATION_KIND_RESTORE_RESOURCES
    )
    found = [
        (support.kind, policy)
        for support in trial.profile.resources
        for policy in support.content
        if (support.kind, policy) != (pb.RESOURCE_KIND_WEIGHTS, pb.CONTENT_POLICY_DISCARD)
    ]
    if not found:
        raise NotPromised("nothing that can be released can be restored without an update")
    return found


@asynccontextmanager
async def _released(
    trial: Trial, kind: Any, policy: Any
) -> AsyncGenerator[tuple[pb.ReleaseResourcesRequest, pb.OperationCompleted]]:
    request = trial.orders.release(resources=[kind], content=policy)
    yield request, await trial.client.completed(request)
    epoch = (await trial.client.profile()).release_epoch
    await trial.client.completed(trial.orders.restore(epoch, resources=[kind]))


async def reopened(trial: Trial) -> None:
    """Release closes admission and restore does not open it: a resume does."""
    if (await trial.client.profile()).state.admission != pb.ADMISSION_STATE_OPEN:
        await trial.resumed()


@case(
    "release.round",
    "What is released stands in the state until it is restored; each rank says what memory it gave"
    " back, or none does where it is not measured; meanwhile the engine does not serve.",
    Need.DESTRUCTIVE,
)
async def round_trip(trial: Trial) -> None:
    for kind, policy in restorable(trial):
        name = named(pb.ResourceKind, kind)
        async with _released(trial, kind, policy) as (_, completed):
            profile = await trial.client.profile()
            held = list(profile.state.released)
            expect(held == [kind], f"released to be [{name}]", held)
            result = completed.release_resources
            expect(completed.changed, "changed = true", brief(completed))
            told = result.release_epoch == profile.release_epoch
            expect(told, f"release epoch {profile.release_epoch}", result.release_epoch)
            measured = {entry.rank for entry in result.memory if entry.resource == kind}
            ranks = set(range(profile.world_size))
            whole = measured in (ranks, set())
            expect(whole, f"memory of ranks {sorted(ranks)}, or of none", sorted(measured))
            health = await trial.client.health("openengine.v1.Inference")
            expect(health == "NOT_SERVING", "Inference NOT_SERVING", health)
        left = list((await trial.client.profile()).state.released)
        expect(not left, "nothing to be released any more", left)
        await reopened(trial)


@case(
    "release.repeated",
    "Releasing what is released already completes with changed = false and leaves the epoch alone.",
    Need.DESTRUCTIVE,
)
async def repeated(trial: Trial) -> None:
    kind, policy = restorable(trial)[0]
    async with _released(trial, kind, policy), trial.unchanged("a repeated release"):
        request = trial.orders.release(resources=[kind], content=policy)
        again = await trial.client.completed(request)
        expect(not again.changed, "changed = false", brief(again))
    await reopened(trial)


@case(
    "release.no-resume",
    "A resume while anything is released is FAILED_PRECONDITION, and restoring does not open"
    " admission.",
    Need.DESTRUCTIVE,
)
async def no_resume(trial: Trial) -> None:
    kind, policy = restorable(trial)[0]
    trial.require_pauses()
    await trial.client.completed(trial.pause())
    epoch = (await trial.client.profile()).pause_epoch
    async with _released(trial, kind, policy):
        await trial.client.refused(trial.orders.resume(epoch), WRONG_STATE)
    admission = (await trial.client.profile()).state.admission
    paused = admission == pb.ADMISSION_STATE_PAUSED
    expect(paused, "admission PAUSED after the restore", named(pb.AdmissionState, admission))
    await trial.resumed()


@case(
    "release.epoch",
    "The release epoch rises with each release, and a restore that names another one is"
    " FAILED_PRECONDITION.",
    Need.DESTRUCTIVE,
)
async def epoch(trial: Trial) -> None:
    kind, policy = restorable(trial)[0]
    before = (await trial.client.profile()).release_epoch
    async with _released(trial, kind, policy):
        now = (await trial.client.profile()).release_epoch
        expect(now > before, f"a release epoch above {before}", now)
        for given in (now - 1, now + 1):
            if given > 0:
                request = trial.orders.restore(given, resources=[kind])
                async with trial.unchanged(f"a restore of epoch {given}"):
                    await trial.client.refused(request, WRONG_STATE)
    await reopened(trial)


@case(
    "release.answers-as-before",
    "After a release with PRESERVE and its restore the same question has the same answer.",
    Need.DESTRUCTIVE,
    Need.INFERENCE,
)
async def answers(trial: Trial) -> None:
    preserved = [one for one in restorable(trial) if one[1] == pb.CONTENT_POLICY_PRESERVE]
    if not preserved:
        raise NotPromised("the profile offers no release that preserves")
    before = trial.traffic.ask(_TOKENS)
    await before.over(trial.patience_s, "while admission is open")
    for kind, policy in preserved:
        async with _released(trial, kind, policy):
            pass
        await reopened(trial)
        after = trial.traffic.ask(_TOKENS)
        await after.over(trial.patience_s, "after the restore")
        same = after.whole and after.text == before.text
        expect(same, f"the answer {before.text!r}", f"{after.text!r}, {after}")


CASES: tuple[Case, ...] = (round_trip, repeated, no_resume, epoch, answers)
