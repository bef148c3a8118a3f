"""Profiles: one at a time, and the artifact comes when it exists."""

from __future__ import annotations

import grpc

from app.conformance.case import Case, Need, case, expect
from app.conformance.client import brief, completed_of
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION
_STOPPED = (pb.PROFILE_STATE_EXPORTING, pb.PROFILE_STATE_READY)


@case(
    "profiling.round",
    "A profile runs from its start until it is stopped, and its operation then ends with an"
    " artifact of each rank, with size and SHA-256; the revision stays as it is.",
)
async def round_trip(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_PROFILE)
    for kind in trial.profile.profiler_kinds:
        before = (await trial.client.profile()).revision
        request = trial.orders.start_profile(kind=kind)
        started = await trial.client.answered(request)
        expect(bool(started.profile_id), "a profile id", brief(started))
        running = started.state == pb.PROFILE_STATE_RUNNING and not started.already_running
        expect(running, "a profile that has just begun to run", brief(started))
        shown = (await trial.client.profile()).state.profile.profile_id
        expect(shown == started.profile_id, f"the state to name {started.profile_id}", shown)
        stopped = await trial.client.answered(trial.orders.stop_profile(started.profile_id))
        expect(stopped.state in _STOPPED, "EXPORTING or READY", brief(stopped))
        ended = await trial.client.ended(started.operation_id)
        expect(ended.HasField("completed"), "the operation to complete", brief(ended))
        artifacts = list(ended.completed.profile.artifacts)
        ranks = sorted({artifact.rank for artifact in artifacts})
        wanted = list(range(trial.profile.world_size))
        expect(ranks == wanted, f"artifacts of ranks {wanted}", ranks)
        whole = all(one.size_bytes and len(one.sha256) == 32 and one.path for one in artifacts)
        expect(whole, "path, size and SHA-256 of each artifact", brief(ended.completed.profile))
        after = (await trial.client.profile()).revision
        expect(after == before, f"revision {before}", after)


@case(
    "profiling.one-at-a-time",
    "Starting the profile that runs already names the running one; another is FAILED_PRECONDITION.",
)
async def one_at_a_time(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_PROFILE)
    started = await trial.client.answered(trial.orders.start_profile())
    try:
        again = await trial.client.answered(trial.orders.start_profile())
        same = again.already_running and again.profile_id == started.profile_id
        expect(same, f"profile {started.profile_id}, already running", brief(again))
        await trial.client.refused(trial.orders.start_profile(duration_ms=59_000), WRONG_STATE)
    finally:
        await trial.client.answered(trial.orders.stop_profile(started.profile_id))
        await trial.client.ended(started.operation_id)


@case(
    "profiling.retry",
    "The same start with the same key is the same profile, also after it has ended.",
)
async def retry(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_PROFILE)
    request = trial.orders.start_profile()
    started = await trial.client.answered(request)
    await trial.client.answered(trial.orders.stop_profile(started.profile_id))
    await trial.client.ended(started.operation_id)
    again = await trial.client.answered(request)
    same = (again.operation_id, again.profile_id) == (started.operation_id, started.profile_id)
    expect(same, f"operation {started.operation_id}", brief(again))
    running = (await trial.client.profile()).state.HasField("profile")
    expect(not running, "no profile to run after the retry", "one runs")


@case("profiling.unknown", "Stopping a profile that the engine does not know is NOT_FOUND.")
async def unknown(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_PROFILE)
    request = trial.orders.stop_profile(f"no-{trial.prefix}")
    await trial.client.refused(request, grpc.StatusCode.NOT_FOUND)


@case(
    "profiling.beside-an-order",
    "A profile can be started and stopped while another order runs.",
    Need.INFERENCE,
)
async def beside(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_PROFILE)
    async with trial.draining() as (stream, _, generation):
        started = await trial.client.answered(trial.orders.start_profile())
        await trial.client.answered(trial.orders.stop_profile(started.profile_id))
        await trial.client.ended(started.operation_id)
        generation.hang_up()
        completed_of(await stream.rest())


@case(
    "profiling.bound",
    "A profile that is bounded by time ends by itself; one without a bound runs until it is"
    " stopped.",
)
async def bound(trial: Trial) -> None:
    trial.require(pb.ADMIN_OPERATION_KIND_PROFILE)
    started = await trial.client.answered(trial.orders.start_profile(duration_ms=50))
    try:
        ended = await trial.client.ended(started.operation_id)
        expect(ended.HasField("completed"), "the operation to complete", brief(ended))
    finally:
        await trial.client.answered(trial.orders.stop_profile(started.profile_id))
    open_ended = await trial.client.answered(trial.orders.start_profile(duration_ms=None))
    running = open_ended.state == pb.PROFILE_STATE_RUNNING
    expect(running, "a profile that runs", brief(open_ended))
    await trial.client.answered(trial.orders.stop_profile(open_ended.profile_id))
    ended = await trial.client.ended(open_ended.operation_id)
    expect(ended.HasField("completed"), "the operation to complete", brief(ended))


CASES: tuple[Case, ...] = (round_trip, one_at_a_time, retry, unknown, beside, bound)
