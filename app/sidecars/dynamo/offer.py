"""What the sidecar offers of a worker: what its kind has, and what it was allowed to order."""

from __future__ import annotations

from app.domain.capabilities import Capabilities
from app.domain.kinds import (
    CacheKind,
    CachePolicy,
    Component,
    ContentPolicy,
    DrainRule,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    WeightSourceKind,
)
from app.enginekit.runtime import EngineDescription
from app.sidecars.allowed import Allowed
from app.sidecars.dynamo.discovery import Discovered


def capabilities_of(found: Discovered, allowed: Allowed) -> Capabilities:
    routes = found.routes
    pauses = routes.pause is not None
    operations = {OperationKind.PAUSE, OperationKind.RESUME} if pauses else set()
    if routes.flush:
        operations.add(OperationKind.FLUSH_CACHES)
    if routes.sleep and routes.wake:
        operations |= {OperationKind.RELEASE_RESOURCES, OperationKind.RESTORE_RESOURCES}
    updates = routes.from_disk is not None and bool(allowed.weights_roots)
    if updates:
        operations.add(OperationKind.UPDATE_WEIGHTS)
    if takes_adapters(found, allowed):
        operations |= {OperationKind.LOAD_LORA, OperationKind.UNLOAD_LORA}
    if routes.abort:
        operations.add(OperationKind.ABORT_REQUESTS)
    return Capabilities(
        operations=frozenset(operations),
        cancellable=frozenset({OperationKind.UPDATE_WEIGHTS}) & operations,
        cache_kinds=frozenset({CacheKind.PREFIX}) if routes.flush else frozenset(),
        # A worker wakes wholly or wakes into trouble: the cache goes along with the weights, and
        # weights that were discarded would be served as soon as they had room again.
        resources={ResourceKind.WEIGHTS: frozenset({ContentPolicy.PRESERVE})}
        if routes.sleep and routes.wake
        else {},
        pause_modes=frozenset(PauseMode) if pauses else frozenset(),
        # Requests come by Dynamo's own plane: what becomes of new ones is its affair, so that a
        # refusal cannot be promised; nor can it be told in time whether any are in flight.
        new_requests=frozenset({NewRequests.HOLD}),
        drain_rules=frozenset({DrainRule.WAIT, DrainRule.ABORT} if pauses else {DrainRule.WAIT}),
        weight_sources=frozenset({WeightSourceKind.DISK}) if updates else frozenset(),
        # It empties the cache with every update, asked or not.
        cache_policies=frozenset({CachePolicy.FLUSH}) if updates else frozenset(),
        components=frozenset({Component.TARGET}) if updates else frozenset(),
        abort_all=False,
        models=found.models,
        world_size=1,
    )


def takes_adapters(found: Discovered, allowed: Allowed) -> bool:
    return bool(allowed.lora_roots) and found.adapters


def describe(found: Discovered) -> EngineDescription:
    return EngineDescription(name="dynamo", version=found.version, models=found.models)
