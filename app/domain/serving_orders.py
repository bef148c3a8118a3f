"""Orders about how an engine serves: its shape, its adapters, and a look at what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from app.domain.capabilities import Capabilities
from app.domain.command import Command, fault, frozen_requests, refuse_frozen, refuse_released
from app.domain.errors import (
    LoraExists,
    ProfileRunning,
    RequestsInFlight,
    UnknownLora,
    WeightsNotValid,
)
from app.domain.facts import EngineFacts, LoraFact
from app.domain.kinds import (
    DrainRule,
    EngineRole,
    OperationKind,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightsState,
)
from app.domain.operation import JsonObject, JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconfigureServing(Command):
    """Absolute targets; None keeps the value. Sizes in ranks, requests and tokens."""

    kind = OperationKind.RECONFIGURE_SERVING
    role: EngineRole | None = None
    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    max_running_requests: int | None = None
    max_batched_tokens: int | None = None
    drain: DrainRule

    def __post_init__(self) -> None:
        targets = self.targets()
        if not targets:
            raise fault("", "name at least one target")
        if self.role is EngineRole.UNKNOWN:
            raise fault("/role", "must be a role")
        for name, wanted in targets.items():
            if isinstance(wanted, int) and wanted <= 0:
                raise fault(f"/{name.value}", "must be above 0")

    def targets(self) -> dict[ReconfigurableField, EngineRole | int]:
        """Those that are named."""
        named = {name: getattr(self, name.value) for name in ReconfigurableField}
        return {name: wanted for name, wanted in named.items() if wanted is not None}

    def document(self) -> JsonObject:
        targets: dict[str, JsonValue] = {n.value: wanted for n, wanted in self.targets().items()}
        if self.role is not None:
            targets["role"] = self.role.value
        return {**Command.document(self), **targets, "drain": self.drain.value}

    @classmethod
    def of(cls, document: JsonObject) -> ReconfigureServing:
        role = cast("str | None", document.get("role"))
        numbers = [
            cast("int | None", document.get(name.value))
            for name in ReconfigurableField
            if name is not ReconfigurableField.ROLE
        ]
        return cls(
            model=cast("str | None", document.get("model")),
            role=None if role is None else EngineRole(role),
            tensor_parallel_size=numbers[0],
            data_parallel_size=numbers[1],
            max_running_requests=numbers[2],
            max_batched_tokens=numbers[3],
            drain=DrainRule(cast("str", document["drain"])),
        )

    def check_supported(self, can: Capabilities) -> None:
        Command.check_supported(self, can)
        for name in self.targets():
            self._require(name.value, name in can.reconfigurable)
        self._require(f"drain {self.drain.value}", self.drain in can.drain_rules)

    def check_state(self, facts: EngineFacts) -> None:
        refuse_released(facts.released)
        if facts.weights.state not in (WeightsState.VALID, WeightsState.UNKNOWN):
            raise WeightsNotValid(facts.weights.shortfall)
        if self.drain is DrainRule.REFUSE and frozen_requests(facts):
            raise RequestsInFlight("requests are frozen by a pause")
        if self.drain is DrainRule.WAIT:
            refuse_frozen(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProfile(Command):
    """`steps` or `duration_ms`, or neither: until it is stopped, or its deadline."""

    kind = OperationKind.PROFILE
    profiler: ProfilerKind
    steps: int | None = None
    duration_ms: int | None = None
    record_shapes: bool = False
    with_stack: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.duration_ms is not None:
            raise fault("/duration_ms", "bound it by steps or by time")
        if self.steps is not None and self.steps <= 0:
            raise fault("/steps", "must be above 0")
        if self.duration_ms is not None and self.duration_ms <= 0:
            raise fault("/duration_ms", "must be above 0 ms")

    def document(self) -> JsonObject:
        return {
            **Command.document(self),
            "profiler": self.profiler.value,
            "steps": self.steps,
            "duration_ms": self.duration_ms,
            "record_shapes": self.record_shapes,
            "with_stack": self.with_stack,
        }

    @classmethod
    def of(cls, document: JsonObject) -> StartProfile:
        return cls(
            model=cast("str | None", document.get("model")),
            profiler=ProfilerKind(cast("str", document["profiler"])),
            steps=cast("int | None", document["steps"]),
            duration_ms=cast("int | None", document["duration_ms"]),
            record_shapes=cast("bool", document["record_shapes"]),
            with_stack=cast("bool", document["with_stack"]),
        )

    def check_supported(self, can: Capabilities) -> None:
        Command.check_supported(self, can)
        self._require(f"profiler {self.profiler.value}", self.profiler in can.profiler_kinds)

    def check_state(self, facts: EngineFacts) -> None:
        running = facts.profile
        if running is not None and running.kind != self.profiler:
            raise ProfileRunning("a profile of another kind is running")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLora(Command):
    """`path` as the engine's host sees it. `id` 0: the engine chooses."""

    kind = OperationKind.LOAD_LORA
    name: str
    path: str
    id: int = 0

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not self.path or "\0" in self.path:
            raise fault("/path", "must be the path of an adapter")
        if self.id < 0:
            raise fault("/id", "must not be below 0")

    def document(self) -> JsonObject:
        return {
            **Command.document(self),
            "name": self.name,
            "path": self.path,
            "id": self.id,
        }

    @classmethod
    def of(cls, document: JsonObject) -> LoadLora:
        return cls(
            model=cast("str | None", document.get("model")),
            name=cast("str", document["name"]),
            path=cast("str", document["path"]),
            id=cast("int", document["id"]),
        )

    def check_state(self, facts: EngineFacts) -> None:
        """Also raises LoraExists."""
        refuse_released(facts.released & {ResourceKind.WEIGHTS})
        for lora in facts.loras:
            if lora.name == self.name and not self._means(lora):
                raise LoraExists("an adapter of that name is loaded from elsewhere: unload it")

    def _means(self, lora: LoraFact) -> bool:
        return self.path == lora.path and self.id in (0, lora.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadLora(Command):
    kind = OperationKind.UNLOAD_LORA
    name: str

    def __post_init__(self) -> None:
        _check_name(self.name)

    def document(self) -> JsonObject:
        return {**Command.document(self), "name": self.name}

    @classmethod
    def of(cls, document: JsonObject) -> UnloadLora:
        return cls(
            model=cast("str | None", document.get("model")), name=cast("str", document["name"])
        )

    def check_state(self, facts: EngineFacts) -> None:
        """Raises UnknownLora."""
        if all(lora.name != self.name for lora in facts.loras):
            raise UnknownLora("no adapter of that name is loaded")


def _check_name(name: str) -> None:
    if not name or not name.isprintable() or len(name) > 256:
        raise fault("/name", "must be 1 to 256 printable characters")
