"""What is read, held against what is kept: what has changed without an order of ours, and the facts
that follow from both. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import cast

from app.backends.vllm.kept import HeldPause, Kept, UnderWay
from app.backends.vllm.readings import BOTH, EngineReading, refuses_new_requests
from app.domain.facts import EngineFacts, PauseFact, WeightsFact
from app.domain.kinds import (
    Admission,
    ContentPolicy,
    DrainRule,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    RevisionSource,
    WeightsState,
)
from app.domain.operation import JsonObject

PAUSING = "pausing"
SLEEPING = "sleeping"
WAKING = "waking"
PREPARING = "preparing"
BEGUN = "begun"
STARTING = "starting"
UPDATING = "updating"
FINISHING = "finishing"
RESUMING = "resuming"
TOUCHED = frozenset({STARTING, UPDATING, FINISHING})
"""In these an update has, or may have, touched the weights."""
WITHDRAWING = "withdrawing"
SENDING = "sending"


def observe(kept: Kept, reading: EngineReading, now: datetime) -> Kept:
    """The same one if nothing is new. While an order of ours is carried out nothing is concluded:
    what is half done is no fact yet."""
    if kept.under_way is not None:
        if not kept.abandoned:
            return kept
        kept = left_behind(kept, reading)
    if reading.stale:
        return kept
    if kept.instance_ids != reading.instance_ids:
        return _another(kept, reading, now)
    return _loras(_version(_sleep(_pause(kept, reading, now), reading), reading), reading)


def left_behind(kept: Kept, reading: EngineReading) -> Kept:
    """The order under way has been ended by somebody who did not see how it left the engine. What
    may have been done is taken as done where that is the safe thing to believe."""
    way = kept.under_way
    assert way is not None
    after = kept.over(None)
    if way.kind is OperationKind.UPDATE_WEIGHTS and way.step in TOUCHED:
        spoilt = replace(after, weights=WeightsState.INCONSISTENT, session_open=True)
        return spoilt.changed()
    if way.kind is OperationKind.RELEASE_RESOURCES and _any_asleep(reading):
        return replace(asleep(after, way), sleep_doubt=True)
    if way.kind is OperationKind.RESTORE_RESOURCES:
        return replace(after, sleep_doubt=True)
    if way.kind is OperationKind.PAUSE and way.step == PAUSING and _any_paused(reading):
        if kept.pause is not None:
            # Which of the two modes is in force can't be seen.
            return after.paused(HeldPause(mode=None, by=way.operation_id))
        return after.paused(pause_of(way, None, settled=not is_drain(way)))
    return after


def asleep(kept: Kept, way: UnderWay) -> Kept:
    """A release has taken effect, or may have. `pause` is left to the caller."""
    discarded = way.request.get("content") == ContentPolicy.DISCARD.value
    return replace(
        kept,
        released=BOTH,
        release_epoch=kept.release_epoch + 1,
        weights=WeightsState.MISSING if discarded else kept.weights,
    ).changed()


def is_drain(way: UnderWay) -> bool:
    return way.request.get("mode") == PauseMode.DRAIN.value


def pause_of(way: UnderWay, since: datetime | None, *, settled: bool = True) -> HeldPause:
    """The pause that an order of a pause makes."""
    mode = PauseMode(str(way.request["mode"]))
    return HeldPause(mode=mode, by=way.operation_id, since=since, settled=settled)


def _any_paused(reading: EngineReading) -> bool:
    return any(member.paused for member in reading.members)


def _any_asleep(reading: EngineReading) -> bool:
    return any(member.sleeping for member in reading.members)


def _doubt(reading: EngineReading) -> bool:
    """Whether an engine that somebody else has paused may sleep as well."""
    return any(member.server.rl_capabilities.sleep_mode_enabled for member in reading.members)


def _another(kept: Kept, reading: EngineReading, now: datetime) -> Kept:
    """Other processes than were known. What the ones before were told went with them."""
    first = not kept.instance_ids
    rest = zip(kept.instance_ids, reading.instance_ids, strict=False)
    some_stay = any(before == after for before, after in rest)
    weights = kept.weights if some_stay else WeightsState.VALID
    if some_stay and reading.version is None:
        weights = WeightsState.INCONSISTENT
    paused = _any_paused(reading)
    raised = 0 if first and not paused else 1
    return replace(
        kept,
        instance_ids=reading.instance_ids,
        pause_epoch=kept.pause_epoch + raised,
        release_epoch=kept.release_epoch + (0 if first else 1),
        pause=(kept.pause if some_stay and kept.pause else HeldPause(mode=None, since=now))
        if paused
        else None,
        released=kept.released if some_stay and _any_asleep(reading) else frozenset(),
        sleep_doubt=paused and _doubt(reading),
        weights=weights,
        version=reading.version,
        updates_since_flush=kept.updates_since_flush if some_stay else 0,
        loras=reading.loras,
        session_open=kept.session_open and some_stay,
        group=None,
    ).changed()


def _pause(kept: Kept, reading: EngineReading, now: datetime) -> Kept:
    paused = _any_paused(reading)
    if paused and kept.pause is None:
        doubted = replace(kept, sleep_doubt=_doubt(reading))
        return doubted.paused(HeldPause(mode=None, since=now))
    if not paused and kept.pause is not None:
        return replace(kept, pause=None, sleep_doubt=False).changed()
    return kept


def _sleep(kept: Kept, reading: EngineReading) -> Kept:
    if kept.released and not _any_asleep(reading):
        # Awake is not whole: weights that were discarded are missing still.
        return replace(kept, released=frozenset(), sleep_doubt=False).changed()
    if not kept.released and reading.sleeping and reading.paused is False:
        # Somebody has resumed it in its sleep: only so a sleep shows that we did not order.
        return replace(kept, released=BOTH, release_epoch=kept.release_epoch + 1).changed()
    return kept


def _version(kept: Kept, reading: EngineReading) -> Kept:
    if kept.version == reading.version:
        return kept
    return replace(kept, version=reading.version).changed()


def _loras(kept: Kept, reading: EngineReading) -> Kept:
    return kept if kept.loras == reading.loras else replace(kept, loras=reading.loras).changed()


# ---- facts ----


def facts_of(kept: Kept, reading: EngineReading, now: datetime) -> EngineFacts:
    way = None if kept.abandoned else kept.under_way
    admission = _admission(kept, reading, way)
    return EngineFacts(
        instance_id=reading.instance_id,
        revision=kept.revision,
        revision_source=RevisionSource.GATEWAY,
        admission=admission,
        pause=None if admission is Admission.OPEN else _pause_fact(kept, reading),
        pause_epoch=kept.pause_epoch,
        released=kept.released,
        release_epoch=kept.release_epoch,
        weights=WeightsFact(
            version=kept.version if reading.stale else reading.version,
            state=_weights(kept, way),
            updates_since_flush=kept.updates_since_flush,
        ),
        loras=kept.loras if reading.stale else reading.loras,
        open_operations=() if way is None else (way.operation_id,),
        observed_at=now,
    )


def _admission(kept: Kept, reading: EngineReading, way: UnderWay | None) -> Admission:
    if reading.stale:
        # As it was read before the order that keeps it from answering.
        if way is None or way.step in (PAUSING, SLEEPING, WAKING, WITHDRAWING):
            return Admission.UNKNOWN
        return Admission.OPEN if kept.pause is None else Admission.PAUSED
    if reading.paused is None:
        return Admission.UNKNOWN
    if not reading.paused:
        return Admission.OPEN
    draining = way is not None and kept.pause is None and _drains(way)
    return Admission.DRAINING if draining else Admission.PAUSED


def _drains(way: UnderWay) -> bool:
    """Whether what the order does just now waits for requests."""
    if way.step == SLEEPING:
        return way.request.get("drain") == DrainRule.WAIT.value
    if way.step != PAUSING:
        return False
    if way.kind is OperationKind.UPDATE_WEIGHTS:
        rule = cast("JsonObject", way.request["admission"])
        pause = cast("JsonObject", rule.get("pause") or {})
        return pause.get("mode") == PauseMode.DRAIN.value
    return is_drain(way)


def _weights(kept: Kept, way: UnderWay | None) -> WeightsState:
    updating = way is not None and way.step in TOUCHED
    return WeightsState.UPDATING if updating else kept.weights


def _pause_fact(kept: Kept, reading: EngineReading) -> PauseFact | None:
    pause = kept.pause
    if pause is None:
        return None
    refuses = refuses_new_requests(reading, pause.mode)
    return PauseFact(
        mode=pause.mode,
        epoch=kept.pause_epoch,
        by=pause.by,
        since=pause.since,
        new_requests=NewRequests.REFUSE if refuses else NewRequests.HOLD,
    )


def troubles_of(kept: Kept, reading: EngineReading) -> tuple[str, ...]:
    """What is not well although it answers, in the words of `Discovery`."""
    found = []
    settled = kept.under_way is None or kept.abandoned
    if settled and not reading.stale and not reading.agrees:
        found.append("members_differ")
    if kept.weights is WeightsState.INCONSISTENT:
        found.append("weights_inconsistent")
    if reading.paused is False and ResourceKind.WEIGHTS in kept.released:
        found.append("serving_without_weights")
    return tuple(found)
