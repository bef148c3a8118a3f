"""An order is done when every rank has done it. These break a rank, and restart the engine."""

from __future__ import annotations

import asyncio

from app.conformance.case import Case, Need, case, expect
from app.conformance.client import brief, described, ends_with
from app.conformance.orders import named
from app.conformance.record import Told
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

_STOPPED_DEADLINE_MS = 3_000
# The state takes a moment to show a rank's death.
_NOTICED_S = 10.0


def _rank(trial: Trial) -> int:
    """The last one: an engine that only minds its first rank is caught."""
    return max(0, int(trial.profile.world_size) - 1)


def _not_applied(told: Told, rank: int) -> None:
    """Either it was refused, or it failed and says which rank did not do its part."""
    expect(not ends_with(told, "completed"), "no success with a rank that is gone", told)
    if told.refusal is not None:
        return
    expect(ends_with(told, "failed"), "the order to fail", described(told))
    failed = told.events[-1].failed
    named = rank in failed.ranks
    expect(named, f"the failure to name rank {rank}", f"{list(failed.ranks)}: {failed.message}")


@case(
    "rank.killed",
    "An order to an engine that has lost a rank is refused, or fails and names the rank; it is"
    " never reported as applied, and the Inference service is NOT_SERVING.",
    Need.HOOK,
)
async def killed(trial: Trial) -> None:
    rank = _rank(trial)
    await trial.fault("kill-rank", str(rank))
    loop = asyncio.get_running_loop()
    until = loop.time() + _NOTICED_S
    while (found := await trial.client.health("openengine.v1.Inference")) == "SERVING":
        expect(loop.time() < until, "Inference NOT_SERVING without one of its ranks", found)
        await asyncio.sleep(0.1)
    _not_applied(await trial.client.told(trial.order(deadline_ms=20_000)), rank)


@case(
    "rank.killed-while-draining",
    "A drain during which a rank dies fails and names the rank, instead of waiting or pausing.",
    Need.HOOK,
    Need.INFERENCE,
)
async def killed_while_draining(trial: Trial) -> None:
    rank = _rank(trial)
    async with trial.draining(deadline_ms=20_000) as (stream, _, _):
        await trial.fault("kill-rank", str(rank))
        _not_applied(await stream.rest(), rank)


@case(
    "rank.stopped",
    "An order to an engine one of whose ranks does not answer fails within its deadline and names"
    " the rank.",
    Need.HOOK,
)
async def stopped(trial: Trial) -> None:
    rank = _rank(trial)
    await trial.fault("stop-rank", str(rank))
    _not_applied(await trial.client.told(trial.order(deadline_ms=_STOPPED_DEADLINE_MS)), rank)


@case(
    "rank.recovers",
    "After a lost rank, a restart brings the engine back: it serves, and every rank is well.",
    Need.HOOK,
)
async def recovers(trial: Trial) -> None:
    await trial.fault("kill-rank", str(_rank(trial)))
    await trial.restart()
    profile = await trial.client.profile()
    ranks = [report for report in profile.state.ranks if report.state == pb.RANK_STATE_FAILED]
    expect(not ranks, "no failed rank", brief(profile.state))
    valid = profile.state.weights.state == pb.WEIGHTS_STATE_VALID
    expect(valid, "weights VALID", named(pb.WeightsState, profile.state.weights.state))
    await trial.client.completed(trial.order())


CASES: tuple[Case, ...] = (killed, killed_while_draining, stopped, recovers)
