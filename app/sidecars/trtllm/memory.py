"""What of its memory a TensorRT-LLM engine has parked, by its own tags. Pure.

Tags and states are those of its documentation, "Runtime Memory Checkpointing".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from app.domain.kinds import ResourceKind
from app.enginekit.runtime import RuntimeFault
from app.sidecars.answers import Answer, Unreadable, field_of
from app.sidecars.faults import refused

TAGS = frozenset(
    {
        "model_weights",
        "model",
        "draft_model_weights",
        "draft_model",
        "kv_cache",
        "sampler",
        "drafter",
        "guided_decoder",
        "spec_resource_manager",
        "model_extra",
        "executor_extra",
    }
)
WEIGHT_TAGS = ("model", "model_weights")
"""By default: the weights, and what else the main model's engine has allocated."""


class State(StrEnum):
    RUNNING = "running"
    PARKING = "parking"
    PARKED = "parked"
    WAKING = "waking"
    FAILED = "failed"  # for good: only another process is whole again


@dataclass(frozen=True, slots=True)
class Memory:
    state: State
    parked: frozenset[str] = frozenset()

    @property
    def settled(self) -> bool:
        return self.state not in (State.PARKING, State.WAKING)

    def may_release(self, tags: frozenset[str]) -> None:
        """Raises RuntimeFault for what the engine would refuse, or worse."""
        self._may_move()
        if self.state is State.PARKED and not tags <= self.parked:
            raise refused(
                "ALREADY_RELEASED",
                "the engine releases nothing more while something is released: restore that"
                " first, and release both together",
            )

    def may_restore(self) -> None:
        """Raises RuntimeFault."""
        self._may_move()

    def _may_move(self) -> None:
        if self.state is State.FAILED:
            raise refused(
                "MEMORY_FAILED", "a memory operation of the engine failed half-way: start it anew"
            )
        if not self.settled:
            raise RuntimeFault(
                "MEMORY_MOVING", "somebody else has the engine park or wake", retryable=True
            )


RUNNING = Memory(State.RUNNING)


def memory_of(answer: Answer) -> Memory:
    """GET /memory_status. Raises Unreadable, also for what contradicts itself."""
    said = field_of(answer, "state", str)
    tags = field_of(answer, "parked_tags", list)
    if said not in set(State) or not all(isinstance(tag, str) for tag in tags):
        raise Unreadable("the engine's memory status cannot be read")
    memory = Memory(State(said), frozenset(tags))
    parked = bool(memory.parked)
    if (memory.state is State.RUNNING and parked) or (memory.state is State.PARKED and not parked):
        raise Unreadable("the engine's memory status contradicts itself")
    return memory


@dataclass(frozen=True, slots=True)
class TagMap:
    """Which tags are meant by a resource. Selecting `model` does not select `model_weights`."""

    weights: tuple[str, ...] = WEIGHT_TAGS

    def tags_of(self, kinds: frozenset[ResourceKind]) -> frozenset[str]:
        return frozenset(tag for kind in kinds for tag in self._table[kind])

    def kinds_of(self, tags: frozenset[str]) -> frozenset[ResourceKind]:
        """A resource is released as soon as a part of it is."""
        return frozenset(kind for kind, own in self._table.items() if tags & set(own))

    @property
    def _table(self) -> Mapping[ResourceKind, tuple[str, ...]]:
        return {ResourceKind.WEIGHTS: self.weights, ResourceKind.KV_CACHE: ("kv_cache",)}
