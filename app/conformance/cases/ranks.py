"""An order is done when every rank has done it. These break a rank, and restart the engine."""

from __future__ import annotations

import asyncio
from typing import Any

from app.conformance.case import Case, Need, NotApplicable, case, expect
from app.conformance.client import brief, described, ends_with
from app.conformance.orders import named
from app.conformance.placing import Way
from app.conformance.record import Refusal, Told
from app.conformance.trial import LONG_S, Trial
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


async def _well(trial: Trial) -> bool:
    """Whether the engine says that every rank is well. Not one that is gone."""
    answer = await trial.client.ask(pb.GetAdminProfileRequest())
    if isinstance(answer, Refusal):
        return False
    return not answer.state.ranks and answer.state.weights.state == pb.WEIGHTS_STATE_VALID


@case(
    "rank.killed",
    "When a rank dies the Inference service is NOT_SERVING until the rank is back, and till then"
    " an order is refused, or fails and names the rank; it is never reported as applied.",
    Need.HOOK,
)
async def killed(trial: Trial) -> None:
    """An engine that brings its rank back by itself may do so before this notices."""
    rank, before = _rank(trial), (await trial.client.profile()).revision
    await trial.fault("kill-rank", str(rank))
    loop = asyncio.get_running_loop()
    within_s = min(_NOTICED_S, trial.patience_s)
    until = loop.time() + within_s
    while (found := await trial.client.health("openengine.v1.Inference")) == "SERVING":
        answer = await trial.client.ask(pb.GetAdminProfileRequest())
        if getattr(answer, "revision", 0) > before and await _well(trial):
            break  # lost, and back already
        expect(
            loop.time() < until,
            f"Inference NOT_SERVING within {within_s:g} s of the loss of a rank",
            found,
        )
        await asyncio.sleep(0.02)
    told = await trial.client.told(trial.order(deadline_ms=20_000))
    if not (ends_with(told, "completed") and await _well(trial)):
        _not_applied(told, rank)


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
    "An order to an engine one of whose ranks does not answer fails once its deadline has passed,"
    " and names the rank.",
    Need.HOOK,
)
async def stopped(trial: Trial) -> None:
    rank = _rank(trial)
    await trial.fault("stop-rank", str(rank))
    _not_applied(await trial.client.told(trial.order(deadline_ms=_STOPPED_DEADLINE_MS)), rank)


def _update(trial: Trial, **fields: Any) -> pb.UpdateWeightsRequest:
    trial.stock.require(Way.DISK)
    return trial.orders.update(trial.stock.path, **fields)


async def _never_mixed(trial: Trial, version: str) -> None:
    """After an update that was not applied: the earlier version, or weights that are not said to
    be valid. An engine that has gone with its rank says neither."""
    answer = await trial.client.ask(pb.GetAdminProfileRequest())
    if isinstance(answer, Refusal):
        expect(answer.of_transport, "the engine to answer, or to be gone", answer)
        return
    weights = answer.state.weights
    kept = weights.version == version or weights.state != pb.WEIGHTS_STATE_VALID
    expect(kept, f"version {version!r}, or weights that are not VALID", brief(weights))


@case(
    "rank.killed-during-an-update",
    "An update during which a rank dies fails and names the rank; the version does not move, or the"
    " weights are said not to be valid.",
    Need.HOOK,
    Need.DESTRUCTIVE,
    Need.INFERENCE,
    Need.WEIGHTS,
)
async def killed_in_update(trial: Trial) -> None:
    """It has been prepared, and waits for a request to end."""
    trial.require_pauses(pb.PAUSE_MODE_DRAIN)
    drain = pb.PauseAround(mode=pb.PAUSE_MODE_DRAIN)
    request = _update(trial, pause=drain, deadline_ms=20_000)
    version, rank = (await trial.client.profile()).state.weights.version, _rank(trial)
    async with trial.traffic.running(LONG_S) as running:
        stream = trial.client.send(request)
        await stream.first()
        await trial.until_draining(running)
        await trial.fault("kill-rank", str(rank))
        _not_applied(await stream.rest(), rank)
    await _never_mixed(trial, version)


@case(
    "rank.stopped-at-an-update",
    "An update to an engine one of whose ranks does not answer fails once its deadline has passed,"
    " and names the rank; the version does not move, or the weights are said not to be valid.",
    Need.HOOK,
    Need.DESTRUCTIVE,
    Need.WEIGHTS,
)
async def stopped_at_update(trial: Trial) -> None:
    request = _update(trial, deadline_ms=_STOPPED_DEADLINE_MS)
    version, rank = (await trial.client.profile()).state.weights.version, _rank(trial)
    await trial.fault("stop-rank", str(rank))
    _not_applied(await trial.client.told(request), rank)
    await _never_mixed(trial, version)


@case(
    "rank.loss-is-told",
    "The loss of a rank is a fact: the state names the rank, and the revision rises.",
    Need.HOOK,
)
async def loss_is_told(trial: Trial) -> None:
    rank, before = _rank(trial), (await trial.client.profile()).revision
    await trial.fault("kill-rank", str(rank))
    loop = asyncio.get_running_loop()
    within_s = min(_NOTICED_S, trial.patience_s)
    until = loop.time() + within_s
    named: set[int] = set()
    while True:
        answer = await trial.client.ask(pb.GetAdminProfileRequest())
        if isinstance(answer, Refusal):
            raise NotApplicable("the engine is gone with that rank, and tells nothing more")
        named |= {report.rank for report in answer.state.ranks}
        if rank in named and answer.revision > before:
            return
        expect(
            loop.time() < until,
            f"rank {rank} in the state and a revision above {before} within {within_s:g} s",
            f"ranks {sorted(named)}, revision {answer.revision}",
        )
        await asyncio.sleep(0.02)


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


CASES: tuple[Case, ...] = (
    killed,
    killed_while_draining,
    killed_in_update,
    stopped,
    stopped_at_update,
    loss_is_told,
    recovers,
)
