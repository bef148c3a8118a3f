"""What is known of a worker that tells little of itself, and what may be sent to it. Pure.

It does not say how its engine is paused, whether it is asleep, or that an update broke off. So what
the sidecar itself brought about is kept here, and on disk, for as long as the worker lives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from app.domain.facts import WeightsFact
from app.domain.kinds import PauseMode, WeightsState
from app.sidecars.faults import refused

SAME_START_S = 5.0
"""How far apart two reckonings of one start may lie: each is a clock's time less an uptime."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one life of a worker. `started_at` in Unix seconds, by this machine's clock, which may be
    set; `since_boot` in seconds of the one that is not. None: not told."""

    worker_id: str | None
    started_at: float | None
    since_boot: float | None = None

    def same_process(self, other: Identity) -> bool:
        """Two starts that were at one time, by either clock. What cannot be told apart is the same:
        what was wrong with it stays wrong."""
        starts = (
            (self.started_at, other.started_at),
            (self.since_boot, other.since_boot),
        )
        told = [(one, two) for one, two in starts if one is not None and two is not None]
        if not told:
            return self.worker_id == other.worker_id
        return any(abs(one - two) < SAME_START_S for one, two in told)

    def same_life(self, other: Identity) -> bool:
        return self.worker_id == other.worker_id and self.same_process(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """`weights`: VALID or INCONSISTENT. `version`: as ordered last; of a worker that tells its own
    that is read instead. `adapters`: where those came from that were loaded through here."""

    paused: PauseMode | None = None
    asleep: bool = False
    weights: WeightsState = WeightsState.VALID
    version: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()

    # ---- what may be sent ----

    def may_resume(self) -> None:
        """A worker resumes an engine whose memory is away. Raises RuntimeFault."""
        if self.asleep:
            raise refused("RESOURCES_RELEASED", "the engine is asleep: restore what is released")
        if self.weights is not WeightsState.VALID:
            raise refused("WEIGHTS_NOT_VALID", WeightsFact(state=self.weights).shortfall)

    def may_drain(self, in_flight: int | None) -> None:
        """Frozen requests never finish. Raises RuntimeFault."""
        if self.paused is PauseMode.KEEP and in_flight != 0:
            raise refused(
                "REQUESTS_FROZEN",
                "requests are frozen and cannot finish: resume, or pause with abort",
            )

    def may_update(self) -> None:
        """A worker takes an update into memory that is away. Raises RuntimeFault."""
        if self.paused is None:
            raise refused("NOT_PAUSED", "the engine is not paused")
        if self.asleep:
            raise refused("RESOURCES_RELEASED", "the weights are released: restore them first")

    # ---- adapters ----

    def came(self, name: str, path: str) -> Belief:
        kept = tuple(one for one in self.adapters if one[0] != name)
        return replace(self, adapters=(*kept, (name, path)))

    def went(self, name: str) -> Belief:
        return replace(self, adapters=tuple(one for one in self.adapters if one[0] != name))

    def path_of(self, name: str) -> str:
        """Empty: it was not loaded through here."""
        return dict(self.adapters).get(name, "")

    # ---- on disk ----

    def document(self, identity: Identity) -> dict[str, Any]:
        return {
            "worker": [identity.worker_id, identity.started_at, identity.since_boot],
            "paused": None if self.paused is None else self.paused.value,
            "asleep": self.asleep,
            "weights": self.weights.value,
            "version": self.version,
            "adapters": [list(one) for one in self.adapters],
        }

    @classmethod
    def of(cls, document: Any, identity: Identity) -> Belief | None:
        """None: of another life of the worker, or there are no notes. A worker that goes on under
        another id keeps what was believed of it. Raises ValueError: not written by `document`."""
        if document is None:
            return None
        try:
            if not identity.same_process(Identity(*document["worker"])):
                return None
            paused, version = document["paused"], document["version"]
            return cls(
                paused=None if paused is None else PauseMode(paused),
                asleep=bool(document["asleep"]),
                weights=WeightsState(document["weights"]),
                version=None if version is None else str(version),
                adapters=tuple((str(name), str(path)) for name, path in document["adapters"]),
            )
        except (TypeError, KeyError) as error:
            raise ValueError("the notes on the worker are damaged") from error
