"""An update that an engine takes by one order, from a checkpoint on disk: kept until the finish,
which names the version. And what holds of every update."""

from __future__ import annotations

from dataclasses import replace

from app.domain.commands import UnderPause, UpdateWeights
from app.domain.errors import DrainRunning, NotPaused, ResourcesReleased
from app.domain.facts import EngineFacts
from app.domain.kinds import Admission, CachePolicy, Component, PauseMode, ResourceKind
from app.domain.weight_sources import DiskWeights
from app.http.compat.announcements import Announced
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import BadBody, WouldHarm
from app.http.compat.transfers import Piece

UNNAMED = "default"
"""What vLLM calls weights that nobody has named."""


def keep_whole(call: CompatCall, announced: Announced, piece: Piece) -> None:
    """For an engine that takes a checkpoint by one order, which names the version: until finish."""
    if announced.checkpoint not in (None, piece.checkpoint):
        raise BadBody("this engine takes one whole checkpoint, and another one is to be finished")
    kept = replace(announced, checkpoint=piece.checkpoint, check_finite=piece.check_finite)
    call.house.announcements.keep(call.engine.id, call.actor, kept)


async def update_by(
    call: CompatCall, announced: Announced, checkpoint: DiskWeights, version: str | None
) -> None:
    facts = await call.facts()
    refuse_unless_still(facts)
    refuse_unless_as_started(announced, facts)
    command = UpdateWeights(
        source=checkpoint,
        weight_version=version or facts.weights.version or UNNAMED,
        cache_policy=cache_policy_under(call, facts),
        admission=UnderPause(facts.pause_epoch or None),
        components=(announced.component or Component.TARGET,),
        check_finite=announced.check_finite,
    )
    operation = await call.begin(command)
    # Whatever becomes of it, what was started is over with it.
    call.house.announcements.keep(call.engine.id, call.actor, Announced())
    await call.ended(operation)


def cache_policy_under(call: CompatCall, facts: EngineFacts) -> CachePolicy:
    """What is frozen goes on from what it has; otherwise the pause was to clear the cache, and not
    every engine can be told so at a pause."""
    frozen = facts.pause is not None and facts.pause.mode is PauseMode.KEEP
    keeps = frozen and CachePolicy.KEEP in call.can.cache_policies
    return CachePolicy.KEEP if keeps else CachePolicy.FLUSH


def refuse_unless_as_started(announced: Announced, facts: EngineFacts) -> None:
    """What was started under an earlier pause may be of a step long past, that the caller has gone
    on with at another gateway: its checkpoint would be loaded in the name of this one's. Raises
    WouldHarm."""
    if announced.pause_epoch != facts.pause_epoch:
        raise WouldHarm("the engine was paused anew since start_weight_update: start again")


def refuse_unless_still(facts: EngineFacts) -> None:
    """vLLM would begin, and its next step find half of a model. Raises FailedPrecondition."""
    if facts.admission is Admission.DRAINING:
        raise DrainRunning("a pause is still waiting for requests: wait for its end")
    if facts.admission is not Admission.PAUSED:
        raise NotPaused("the engine is not paused: pause it before its weights are updated")
    if ResourceKind.WEIGHTS in facts.released:
        raise ResourcesReleased("the weights are asleep: wake them up first")
