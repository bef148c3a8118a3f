"""New weights on all ranks or on none."""

from __future__ import annotations

from functools import partial
from typing import cast

from app.domain.commands import Pause, PauseAround, UpdateWeights
from app.domain.kinds import Admission, CachePolicy, Component, WeightsState
from app.domain.operation import JsonObject, JsonValue, OperationWarning, Progress
from app.domain.transitions import Progressed
from app.enginekit.errands import Ending, Errand, flushed_rows
from app.enginekit.pausing import PAUSE_NOT_LIFTED, OwnPause
from app.enginekit.records import REVISION, Counters
from app.enginekit.runtime import Conclusion, Observation
from app.enginekit.staging import named_by, stage_pieces

_CACHE_KEPT = OperationWarning(
    "CACHE_KEPT",
    "what earlier weights computed is kept: requests in flight and later ones go on from it",
)


async def update_weights(errand: Errand) -> Ending:
    """Prepared beside the live weights while the engine serves; then paused, if it pauses by
    itself; then committed. What can't be prepared disturbs no request."""
    command = cast("UpdateWeights", errand.command)
    state = errand.state
    previous = state.weights.version
    own = OwnPause()

    def began() -> None:
        state.update_began()
        errand.undo_change = REVISION

    async def before_commit() -> None:
        rule = command.admission
        if isinstance(rule, PauseAround) and state.gate.admission is Admission.OPEN:
            await own.make(errand, _pause(command, rule))
        # Weights are a fact: valid, updating, and valid again are three revisions.
        await errand.record(Progressed(progress=Progress("committing")), REVISION, began)

    async with own.lifted_on_failure(errand):
        conclusion = await errand.over_ranks(
            before_prepare=partial(stage_pieces, errand) if errand.session else None,
            before_commit=before_commit,
        )
    command = named_by(errand.session, command)
    lifted = await own.lift(errand)
    kept = command.cache_policy is CachePolicy.KEEP
    updates = state.weights.updates_since_flush + 1 if kept else 0

    def settle(_: Counters, seen: Observation | None) -> None:
        state.updated(command.weight_version, updates, seen)
        if lifted:
            state.resumed(seen)

    unconfirmed = _unconfirmed(command, conclusion)
    return Ending(
        result=lambda _: _result(command, conclusion, previous, updates, unconfirmed),
        change=REVISION,
        settle=settle,
        shows=lambda seen: (
            seen.weights.version == command.weight_version
            and seen.weights.state is WeightsState.VALID
        ),
        proved=conclusion.proved and not unconfirmed and _all_evident(errand, conclusion),
        warnings=tuple(_warnings(kept, unconfirmed, own.holds and not lifted)),
    )


def _pause(command: UpdateWeights, rule: PauseAround) -> Pause:
    return Pause(
        model=command.model,
        mode=rule.mode,
        new_requests=rule.new_requests,
        hold_limit_ms=rule.hold_limit_ms,
    )


def _unconfirmed(command: UpdateWeights, conclusion: Conclusion) -> tuple[Component, ...]:
    confirmed = conclusion.components
    if confirmed is None:
        return ()
    return tuple(component for component in command.components if component not in confirmed)


def _all_evident(errand: Errand, conclusion: Conclusion) -> bool:
    return {evidence.rank for evidence in conclusion.evidence} >= set(errand.ranks())


def _warnings(
    kept: bool, unconfirmed: tuple[Component, ...], still_paused: bool
) -> list[OperationWarning]:
    told = []
    if kept:
        told.append(_CACHE_KEPT)
    if unconfirmed:
        names = ", ".join(unconfirmed)
        text = f"the engine could not confirm new weights of: {names}"
        told.append(OperationWarning("COMPONENT_UNCONFIRMED", text))
    if still_paused:
        told.append(PAUSE_NOT_LIFTED)
    return told


def _result(
    command: UpdateWeights,
    conclusion: Conclusion,
    previous: str | None,
    updates_since_flush: int,
    unconfirmed: tuple[Component, ...],
) -> JsonObject:
    evidence: list[JsonValue] = [
        {
            "rank": one.rank,
            "tensors": one.tensors,
            "bytes": one.size_bytes,
            "sha256": one.sha256.hex(),
        }
        for one in sorted(conclusion.evidence, key=lambda one: one.rank)
    ]
    confirmed: list[JsonValue] = [
        component.value for component in command.components if component not in unconfirmed
    ]
    missing: list[JsonValue] = [component.value for component in unconfirmed]
    switched: list[JsonValue] = [
        {"request_id": one.request_id, "output_tokens": one.output_tokens}
        for one in conclusion.switched
    ]
    return {
        "changed": True,
        "weight_version": command.weight_version,
        "previous_weight_version": previous or "",
        "evidence": evidence,
        "confirmed": confirmed,
        "unconfirmed": missing,
        "flushed": flushed_rows(conclusion.flushed),
        "switched": switched,
        "updates_since_flush": updates_since_flush,
    }
