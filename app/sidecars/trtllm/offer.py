"""What the sidecar offers of a TensorRT-LLM engine."""

from __future__ import annotations

from app.domain.capabilities import Capabilities
from app.domain.kinds import (
    ContentPolicy,
    DrainRule,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
)
from app.enginekit.runtime import EngineDescription, Feature
from app.sidecars.trtllm.discovery import Discovered

NAME = "tensorrt_llm"


def capabilities_of(found: Discovered, *, only_way: bool) -> Capabilities:
    """`only_way`: nobody reaches the engine but through the sidecar. A pause is the sidecar's own
    gate, so that it is offered only then; a release closes the engine by itself.

    The engine's settings decide what becomes of contents, by default: weights are kept, KV is not.
    KV is also offered to be kept, as the room that comes back: with no request in flight nothing
    but a cache is in it, and the order warns. It has no call for new weights, so that none may be
    dropped.
    """
    operations: set[OperationKind] = set()
    if found.generates:
        operations.add(OperationKind.ABORT_REQUESTS)
    if found.parks:
        operations |= {OperationKind.RELEASE_RESOURCES, OperationKind.RESTORE_RESOURCES}
    if only_way:
        operations |= {OperationKind.PAUSE, OperationKind.RESUME}
    return Capabilities(
        operations=frozenset(operations),
        resources={
            ResourceKind.WEIGHTS: frozenset({ContentPolicy.PRESERVE}),
            ResourceKind.KV_CACHE: frozenset(ContentPolicy),
        }
        if found.parks
        else {},
        pause_modes=frozenset({PauseMode.DRAIN, PauseMode.ABORT}) if only_way else frozenset(),
        new_requests=frozenset(NewRequests),
        drain_rules=frozenset(DrainRule) if only_way else frozenset({DrainRule.WAIT}),
        abort_all=only_way,
        models=found.models,
    )


def describe(found: Discovered) -> EngineDescription:
    return EngineDescription(
        name=NAME,
        version=found.version,
        models=found.models,
        features=frozenset(
            {
                Feature.MIN_P,
                Feature.FREQUENCY_PENALTY,
                Feature.PRESENCE_PENALTY,
                Feature.REPETITION_PENALTY,
                Feature.CACHE_SALT,
            }
        ),
    )
