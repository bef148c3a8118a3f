"""New weights for an engine that goes on living."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, TypeAlias, cast

from app.domain.capabilities import Capabilities
from app.domain.command import Command, fault, refuse_frozen, refuse_released
from app.domain.errors import DrainRunning, NotPaused, StalePauseEpoch, WeightsNotValid
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Admission,
    CachePolicy,
    Component,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    WeightsState,
)
from app.domain.operation import JsonObject, JsonValue
from app.domain.weight_sessions import SessionWeights, check_version
from app.domain.weight_sources import (
    DistributedWeights,
    InlineWeights,
    WeightSource,
    source_document,
    source_of,
)


@dataclass(frozen=True, slots=True)
class UnderPause:
    """The caller holds a pause; the update touches no admission. `pause_epoch`: which one."""

    pause_epoch: int | None = None

    def document(self) -> dict[str, JsonValue]:
        return {"under_pause": {"pause_epoch": self.pause_epoch}}

    def check_state(self, facts: EngineFacts) -> None:
        if self.pause_epoch is not None and self.pause_epoch != facts.pause_epoch:
            raise StalePauseEpoch(given=self.pause_epoch, current=facts.pause_epoch)
        if facts.admission is Admission.DRAINING:
            raise DrainRunning("a drain is running: wait for it")
        if facts.admission is Admission.OPEN:
            raise NotPaused("the engine is not paused")


@dataclass(frozen=True, slots=True)
class PauseAround:
    """The update pauses by itself, and lifts that pause when weights are valid afterwards. On an
    engine that is paused already it makes none and lifts none."""

    mode: PauseMode
    new_requests: NewRequests = NewRequests.HOLD
    hold_limit_ms: int | None = None

    def document(self) -> dict[str, JsonValue]:
        return {
            "pause": {
                "mode": self.mode.value,
                "new_requests": self.new_requests.value,
                "hold_limit_ms": self.hold_limit_ms,
            }
        }

    def check_state(self, facts: EngineFacts) -> None:
        if self.mode is not PauseMode.KEEP:
            refuse_frozen(facts)


AdmissionRule: TypeAlias = UnderPause | PauseAround


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights(Command):
    """`weight_version` becomes the engine's when, and only when, the update succeeds."""

    kind = OperationKind.UPDATE_WEIGHTS
    source: WeightSource
    weight_version: str
    cache_policy: CachePolicy
    admission: AdmissionRule
    components: tuple[Component, ...] = (Component.TARGET,)
    check_finite: bool = False

    def __post_init__(self) -> None:
        check_version(self.weight_version, "/weight_version")
        if not self.components:
            raise fault("/components", "name at least one component")
        if len(set(self.components)) != len(self.components):
            raise fault("/components", "name each component once")
        match self.admission:
            case UnderPause(pause_epoch=epoch) if epoch is not None and epoch <= 0:
                raise fault("/under_pause/pause_epoch", "epochs start at 1")
            case PauseAround(new_requests=rule, hold_limit_ms=limit) if limit is not None:
                if rule is not NewRequests.HOLD:
                    raise fault("/pause/hold_limit_ms", "goes with new_requests hold")
                if limit <= 0:
                    raise fault("/pause/hold_limit_ms", "must be above 0 ms")

    def document(self) -> JsonObject:
        components: list[JsonValue] = [component.value for component in self.components]
        return {
            **Command.document(self),
            "source": source_document(self.source),
            "weight_version": self.weight_version,
            "cache_policy": self.cache_policy.value,
            "components": components,
            "admission": self.admission.document(),
            "check_finite": self.check_finite,
        }

    @classmethod
    def of(cls, document: JsonObject) -> UpdateWeights:
        return cls(
            model=cast("str | None", document.get("model")),
            source=source_of(cast("JsonObject", document["source"])),
            weight_version=cast("str", document["weight_version"]),
            cache_policy=CachePolicy(cast("str", document["cache_policy"])),
            components=tuple(Component(n) for n in cast("list[str]", document["components"])),
            admission=_admission(cast("JsonObject", document["admission"])),
            check_finite=cast("bool", document["check_finite"]),
        )

    @property
    def payload(self) -> bytes | None:
        return self.source.content if isinstance(self.source, InlineWeights) else None

    def carrying(self, payload: bytes) -> Self:
        if not isinstance(self.source, InlineWeights):
            raise ValueError("only inline tensors go with the order")
        return replace(self, source=self.source.filled(payload))

    @property
    def lacks_payload(self) -> bool:
        return isinstance(self.source, InlineWeights) and self.source.content is None

    def check_supported(self, can: Capabilities) -> None:
        Command.check_supported(self, can)
        source = self.source
        self._require(f"source {source.kind.value}", source.kind in can.weight_sources)
        policy = self.cache_policy
        self._require(f"cache_policy {policy.value}", policy in can.cache_policies)
        for component in self.components:
            self._require(f"component {component.value}", component in can.components)
        if isinstance(source, InlineWeights):
            source.check_fits(can.limits.max_message_bytes)
        if isinstance(source, DistributedWeights):
            source.check_ranks(can.world_size)
        if isinstance(source, SessionWeights):
            source.check_supported(can)
        if isinstance(self.admission, PauseAround):
            self._check_pause(self.admission, can)

    def _check_pause(self, pause: PauseAround, can: Capabilities) -> None:
        self._require(f"pause {pause.mode.value}", pause.mode in can.pause_modes)
        rule = pause.new_requests
        self._require(f"new_requests {rule.value}", rule in can.new_requests)
        longest = can.limits.max_hold_limit_ms
        if pause.hold_limit_ms is not None and longest and pause.hold_limit_ms > longest:
            detail = f"the longest hold of this engine is {longest} ms"
            raise fault("/pause/hold_limit_ms", detail)

    def check_state(self, facts: EngineFacts) -> None:
        # There is nothing to write into; what else is released does not matter.
        refuse_released(facts.released & {ResourceKind.WEIGHTS})
        self.admission.check_state(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWeightVersion(Command):
    """A label alone: the weights stay, and so does what they have cached."""

    kind = OperationKind.SET_WEIGHT_VERSION
    weight_version: str

    def __post_init__(self) -> None:
        check_version(self.weight_version, "/weight_version")

    def document(self) -> JsonObject:
        return {**Command.document(self), "weight_version": self.weight_version}

    @classmethod
    def of(cls, document: JsonObject) -> SetWeightVersion:
        return cls(
            model=cast("str | None", document.get("model")),
            weight_version=cast("str", document["weight_version"]),
        )

    def check_state(self, facts: EngineFacts) -> None:
        """Weights that are not valid have no name. Raises WeightsNotValid."""
        if facts.weights.state is not WeightsState.VALID:
            raise WeightsNotValid(facts.weights.shortfall)


def _admission(document: JsonObject) -> AdmissionRule:
    ((rule, found),) = document.items()
    parts = cast("JsonObject", found)
    if rule == "under_pause":
        return UnderPause(cast("int | None", parts["pause_epoch"]))
    return PauseAround(
        mode=PauseMode(cast("str", parts["mode"])),
        new_requests=NewRequests(cast("str", parts["new_requests"])),
        hold_limit_ms=cast("int | None", parts["hold_limit_ms"]),
    )
