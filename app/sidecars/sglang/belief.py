"""What is known of an engine that tells little of itself, and what may be sent to it. Pure.

SGLang does not say how it is paused, what of its memory is away, or whether an update broke off;
and it carries out orders that end it. So what the sidecar itself brought about is kept here, and
on disk, for as long as the engine lives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from app.domain.facts import WeightsFact
from app.domain.kinds import PauseMode, ResourceKind, WeightsState
from app.sidecars.faults import refused
from app.sidecars.sglang.discovery import Discovered, Identity

TAGS = {
    ResourceKind.WEIGHTS: "weights",
    ResourceKind.KV_CACHE: "kv_cache",
    ResourceKind.EXECUTION_GRAPHS: "cuda_graph",
}


class Hold(StrEnum):
    """The server's own modes. Under ABORT its front end alone lets nothing in; under the others
    its scheduler stands still too. RETRACT puts requests back in the queue, without their KV."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


HOLDS = {
    PauseMode.ABORT: Hold.ABORT,
    # Nothing is left to be held when it comes; what slips in meanwhile goes back into the queue,
    # as if it had come a moment later.
    PauseMode.DRAIN: Hold.RETRACT,
    PauseMode.KEEP: Hold.IN_PLACE,
}


PAYLOADS_REMEMBERED = 1024
"""Some updates of a large model, and more than a client sends again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """`released`: tags that were released and not resumed. `doubtful`: whether those of an order
    that got no answer are away, nobody knows. `session`: an update was begun and not ended.
    `payloads`: digests of those that it was sent and that it must not be sent again, the latest
    last. `models` and `root` are the ones it was started with; both change with an update from
    disk."""

    paused: PauseMode | None = None
    hold: Hold | None = None
    released: frozenset[ResourceKind] = frozenset()
    doubtful: bool = False
    weights: WeightsState = WeightsState.VALID
    session: bool = False
    payloads: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    root: str = ""

    # ---- what may be sent ----

    def may_resume(self) -> None:
        """SGLang resumes an engine whose memory is away, or whose weights are no model's. Raises
        RuntimeFault."""
        self.may_rely_on_memory()
        if self.released:
            raise refused("RESOURCES_RELEASED", "memory is released: restore it first")
        if self.weights is not WeightsState.VALID:
            raise refused("WEIGHTS_NOT_VALID", WeightsFact(state=self.weights).shortfall)

    def may_release(self, kinds: frozenset[ResourceKind]) -> None:
        """It ends unless nothing runs, and on a GPU of a release of what is away. Raises
        RuntimeFault."""
        self.may_rely_on_memory()
        if self.paused is None:
            raise refused("NOT_PAUSED", "the engine is not paused")
        if kinds & self.released:
            raise refused("ALREADY_RELEASED", "some of it is released already")

    def may_restore(self, kinds: frozenset[ResourceKind]) -> None:
        """It ends of a resume of what is not away, and of one without tags if any of them is not.
        Raises RuntimeFault."""
        self.may_rely_on_memory()
        if not kinds <= self.released:
            raise refused("NOT_RELEASED", "some of it is not released")

    def may_update(self) -> None:
        """Raises RuntimeFault."""
        self.may_rely_on_memory()
        if self.paused is None:
            raise refused("NOT_PAUSED", "the engine is not paused")
        if ResourceKind.WEIGHTS in self.released:
            raise refused("RESOURCES_RELEASED", "the weights are released: restore them first")

    def may_rely_on_memory(self) -> None:
        """Raises RuntimeFault."""
        if self.doubtful:
            raise refused(
                "MEMORY_NOT_KNOWN",
                "whether memory is released is not known, and asking for the wrong one ends the"
                " engine: start it anew",
            )

    # ---- what becomes of it ----

    def paused_as(self, mode: PauseMode, hold: Hold) -> Belief:
        return replace(self, paused=mode, hold=hold)

    @property
    def open(self) -> Belief:
        return replace(self, paused=None, hold=None)

    # ---- on disk ----

    def document(self, identity: Identity) -> dict[str, Any]:
        return {
            "engine": identity.token,
            "paused": None if self.paused is None else self.paused.value,
            "hold": None if self.hold is None else self.hold.value,
            "released": sorted(self.released),
            "doubtful": self.doubtful,
            "weights": self.weights.value,
            "session": self.session,
            "payloads": list(self.payloads),
            "models": list(self.models),
            "root": self.root,
        }

    @classmethod
    def of(cls, document: Any, identity: Identity) -> Belief | None:
        """None: of another life of the engine. Raises ValueError: not written by `document`."""
        try:
            if document["engine"] != identity.token:
                return None
            paused, hold = document["paused"], document["hold"]
            return cls(
                paused=None if paused is None else PauseMode(paused),
                hold=None if hold is None else Hold(hold),
                released=frozenset(ResourceKind(name) for name in document["released"]),
                doubtful=bool(document["doubtful"]),
                weights=WeightsState(document["weights"]),
                session=bool(document["session"]),
                # Not there in notes of releases that passed none on.
                payloads=tuple(str(one) for one in document.get("payloads", ())),
                models=tuple(str(name) for name in document["models"]),
                root=str(document["root"]),
            )
        except (TypeError, KeyError) as error:
            raise ValueError("the notes on the engine are damaged") from error


def first_belief(found: Discovered, *, paused: bool) -> Belief:
    """Of an engine that others may have had before. How it was paused cannot be read; KEEP is the
    mode that nothing must be concluded from."""
    return Belief(
        paused=PauseMode.KEEP if paused else None,
        hold=Hold.IN_PLACE if paused else None,
        models=found.models,
        root=found.root,
    )
