"""What an engine itself has acknowledged about its administrative state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from app.domain.kinds import (
    Admission,
    EngineRole,
    NewRequests,
    PauseMode,
    ResourceKind,
    RevisionSource,
    WeightsState,
)

EXTERNAL = "external"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseFact:
    """`by`: the operation that paused it, or `external`. `mode` None: somebody else paused it, and
    the engine does not tell how. Times UTC."""

    mode: PauseMode | None
    epoch: int
    by: str
    since: datetime | None
    new_requests: NewRequests = NewRequests.HOLD
    hold_limit_ms: int | None = None
    requests_kept: int = 0
    requests_held: int = 0


@dataclass(frozen=True, slots=True)
class WeightsFact:
    """`version` None: the engine declares none."""

    version: str | None = None
    state: WeightsState = WeightsState.UNKNOWN
    updates_since_flush: int = 0

    @property
    def shortfall(self) -> str:
        """Of weights that are not valid: what they are, and the way back."""
        if self.state is WeightsState.UPDATING:
            return "weights are updating: wait for the end of it"
        return f"weights are {self.state.value}: a full update of them is the way back"


@dataclass(frozen=True, slots=True)
class LoraFact:
    name: str
    id: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class ProfileFact:
    id: str
    kind: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Epochs name the latest pause and release that took effect; 0: none yet."""

    instance_id: str
    revision: int
    revision_source: RevisionSource = RevisionSource.ENGINE
    admission: Admission = Admission.UNKNOWN
    pause: PauseFact | None = None
    pause_epoch: int = 0
    released: frozenset[ResourceKind] = frozenset()
    release_epoch: int = 0
    weights: WeightsFact = WeightsFact()
    role: EngineRole = EngineRole.UNKNOWN
    profile: ProfileFact | None = None
    loras: tuple[LoraFact, ...] = ()
    open_operations: tuple[str, ...] = ()
    observed_at: datetime

    @property
    def serving(self) -> bool:
        return (
            self.admission is Admission.OPEN
            and not self.released
            and self.weights.state is WeightsState.VALID
        )
