"""What is known of an engine that tells little of itself, and what may be sent to it. Pure.

vLLM does not say in which mode it is paused, what of it is asleep, or whether an update broke off;
and it carries out orders that end it. So what the sidecar itself brought about is kept here, and
on disk, for as long as the engine lives: a sidecar that is started anew must not open what an
earlier one had closed for a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from app.domain.facts import WeightsFact
from app.domain.kinds import ContentPolicy, PauseMode, ResourceKind, WeightsState
from app.sidecars.faults import refused
from app.sidecars.vllm.answers import Sleeping
from app.sidecars.vllm.discovery import Identity

WEIGHTS, KV = ResourceKind.WEIGHTS, ResourceKind.KV_CACHE
BOTH = frozenset({WEIGHTS, KV})

MODES = {PauseMode.DRAIN: "wait", PauseMode.ABORT: "abort", PauseMode.KEEP: "keep"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """`released`: as ordered. `asleep`: what the engine has really given back, which is more while
    KV follows the weights. `weights`: VALID, MISSING or INCONSISTENT."""

    paused: PauseMode | None = None
    released: frozenset[ResourceKind] = frozenset()
    asleep: frozenset[ResourceKind] = frozenset()
    weights: WeightsState = WeightsState.VALID

    # ---- what may be sent ----

    def may_resume(self) -> None:
        """vLLM resumes an engine whose memory is away, and dies of the next request. Raises
        RuntimeFault."""
        if self.asleep:
            raise refused("RESOURCES_RELEASED", "the engine is asleep: restore what is released")
        if self.weights is not WeightsState.VALID:
            raise refused("WEIGHTS_NOT_VALID", WeightsFact(state=self.weights).shortfall)

    def may_drain(self, in_flight: int | None) -> None:
        """vLLM calls a drain complete whose requests an earlier pause has frozen. Raises
        RuntimeFault."""
        if self.paused is PauseMode.KEEP and in_flight != 0:
            raise refused(
                "REQUESTS_FROZEN",
                "requests are frozen and cannot finish: resume, or pause with abort",
            )

    def may_start_update(self) -> None:
        """A started update takes the model apart: a request that runs then ends the engine, and so
        does one into memory that is away. Raises RuntimeFault."""
        if self.paused is None:
            raise refused("NOT_PAUSED", "the engine is not paused")
        if WEIGHTS in self.asleep:
            raise refused("RESOURCES_RELEASED", "the weights are released: restore them first")

    # ---- releasing and restoring ----

    def release(
        self, kinds: frozenset[ResourceKind], content: ContentPolicy, *, selective: bool
    ) -> tuple[Step, ...]:
        """How to get there. `selective`: the engine can give its KV memory back by itself.

        Sleeping always takes both, so that KV goes with the weights, named or not. An engine that
        is asleep ignores being told to sleep: it is woken first.
        """
        level = 1 if content is ContentPolicy.PRESERVE else 2
        if WEIGHTS in kinds:
            wake = (Wake(self.asleep),) if self.asleep else ()
            return (*wake, Sleep(level))
        if KV in self.asleep:
            return ()
        return (ReleaseKv(),) if selective else (Sleep(1), Wake(frozenset({WEIGHTS})))

    def restore(self, kinds: frozenset[ResourceKind]) -> tuple[Step, ...]:
        """KV comes back with the last of the weights: the engine opens itself when nothing is
        asleep any more, which must not be before its weights are valid."""
        left = self.released - kinds
        missing = self.weights is not WeightsState.VALID
        away = left | (frozenset({KV}) if missing or WEIGHTS in left else frozenset())
        back = self.asleep - away
        return (Wake(back),) if back else ()

    def catch_up(self) -> tuple[Step, ...]:
        """When weights have become valid: KV that only waited for them."""
        return self.restore(frozenset())

    def after(self, step: Step) -> Belief:
        match step:
            case Sleep(level=level):
                weights = WeightsState.MISSING if level == 2 else self.weights
                return replace(self, asleep=BOTH, weights=weights)
            case ReleaseKv():
                return replace(self, asleep=frozenset({KV}))
            case Wake(kinds=kinds):
                return replace(self, asleep=self.asleep - kinds)

    def opens(self, step: Step) -> bool:
        """Whether the engine takes up requests by itself behind it."""
        return isinstance(step, Wake) and not self.asleep - step.kinds

    # ---- on disk ----

    def document(self, identity: Identity) -> dict[str, Any]:
        return {
            "engine": [identity.started_at, identity.instance],
            "paused": None if self.paused is None else self.paused.value,
            "released": sorted(self.released),
            "asleep": sorted(self.asleep),
            "weights": self.weights.value,
        }

    @classmethod
    def of(cls, document: Any, identity: Identity) -> Belief | None:
        """None: of another life of the engine. Raises ValueError: not written by `document`."""
        try:
            if document["engine"] != [identity.started_at, identity.instance]:
                return None
            paused = document["paused"]
            return cls(
                paused=None if paused is None else PauseMode(paused),
                released=frozenset(ResourceKind(name) for name in document["released"]),
                asleep=frozenset(ResourceKind(name) for name in document["asleep"]),
                weights=WeightsState(document["weights"]),
            )
        except (TypeError, KeyError) as error:
            raise ValueError("the notes on the engine are damaged") from error


@dataclass(frozen=True, slots=True)
class Sleep:
    """1: weights to host memory. 2: weights dropped. KV is dropped by both."""

    level: int


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    pass


@dataclass(frozen=True, slots=True)
class Wake:
    kinds: frozenset[ResourceKind]


Step: TypeAlias = Sleep | ReleaseKv | Wake


def first_belief(*, paused: bool, sleep: Sleeping | None) -> Belief:
    """Of an engine that others may have had before. How it was paused cannot be read; KEEP is the
    mode that nothing must be concluded from."""
    away = _AWAY.get(sleep, frozenset()) if sleep is not None else frozenset()
    gone = sleep is Sleeping.DISCARDED
    return Belief(
        paused=PauseMode.KEEP if paused else None,
        released=away,
        asleep=away,
        weights=WeightsState.MISSING if gone else WeightsState.VALID,
    )


_AWAY = {
    Sleeping.OFFLOADED: BOTH,
    Sleeping.DISCARDED: BOTH,
    Sleeping.KV_ALONE: frozenset({KV}),
}
