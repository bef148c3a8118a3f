"""Weights that must not be taken, by each way in which they may come: a case for each pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.conformance.case import Case, Need, NotApplicable, case
from app.conformance.client import ends_with
from app.conformance.placing import Way
from app.conformance.tensors import (
    Weights,
    WeightsUnreadable,
    misnamed,
    misshapen,
    mistyped,
    not_finite,
    without_one,
)
from app.conformance.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """`may_succeed`: the engine may take what is there, and keep its own for the rest."""

    name: str
    words: str
    change: Callable[[Weights], Weights]
    cut: bool = False
    check_finite: bool = False
    may_succeed: bool = False


DAMAGES = (
    Damage(name="wrong-name", words="of a tensor that the model does not have", change=misnamed),
    Damage(name="wrong-shape", words="of which a tensor has the wrong shape", change=misshapen),
    Damage(name="wrong-type", words="of which a tensor has the wrong type", change=mistyped),
    Damage(name="truncated", words="that break off in the middle", change=lambda w: w, cut=True),
    Damage(
        name="not-finite",
        words="with a NaN, where the order asks to look for one,",
        change=not_finite,
        check_finite=True,
    ),
    Damage(
        name="missing-tensor",
        words="that lack a tensor",
        change=without_one,
        may_succeed=True,
    ),
)
_PLACES = {
    Way.DISK: ("in files", (Need.SCRATCH,)),
    Way.INLINE: ("within the order", ()),
    Way.SHARED_MEMORY: ("in shared memory", (Need.SHARED,)),
}


def _case(way: Way, damage: Damage) -> Case:
    place, needs = _PLACES[way]
    end = (
        "are refused or rolled back, or the tensor keeps its value: the same question has the same"
        " answer afterwards."
        if damage.may_succeed
        else "are refused or rolled back on every rank, and the old ones answer with the same"
        " tokens."
    )

    @case(
        f"update.{way.value}-{damage.name}",
        f"Weights {place} {damage.words} {end}",
        Need.DESTRUCTIVE,
        Need.INFERENCE,
        Need.WEIGHTS,
        Need.COPY,
        *needs,
    )
    async def run(trial: Trial) -> None:
        await _tried(trial, way, damage)

    return run


async def _tried(trial: Trial, way: Way, damage: Damage) -> None:
    stock = trial.stock
    stock.require(way)
    # What is then damaged is known to be right otherwise.
    with stock.order(way, stock.copy) as request:
        await stock.loaded(request)
    before = await stock.answer()
    try:
        weights = damage.change(stock.copy)
    except WeightsUnreadable as unfit:
        raise NotApplicable(str(unfit)) from unfit
    with stock.order(way, weights, cut=damage.cut, check_finite=damage.check_finite) as request:
        if damage.may_succeed:
            told = await trial.client.told(request)
            if not ends_with(told, "completed"):
                request.idempotency_key = trial.key()
                await stock.turned_away(request)
        else:
            await stock.turned_away(request)
    await stock.answers_as(before, "as before the update")


CASES: tuple[Case, ...] = tuple(_case(way, damage) for way in Way for damage in DAMAGES)
