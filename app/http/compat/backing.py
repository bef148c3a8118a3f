"""What has to be behind an endpoint for there to be one: the capabilities of the engine."""

from __future__ import annotations

from collections.abc import Callable

from app.domain.capabilities import Capabilities
from app.domain.engine_payloads import SGLANG_TENSORS
from app.domain.kinds import (
    CacheKind,
    Component,
    ContentPolicy,
    OperationKind,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightTransferBackend,
)
from app.http.compat.transfers import ways

Backed = Callable[[Capabilities], bool]


def always(_: Capabilities) -> bool:
    return True


def orders(*kinds: OperationKind) -> Backed:
    return lambda can: can.operations.issuperset(kinds)


def flushes(cache: CacheKind) -> Backed:
    ordered = orders(OperationKind.FLUSH_CACHES)
    return lambda can: ordered(can) and cache in can.cache_kinds


pauses = orders(OperationKind.PAUSE, OperationKind.RESUME)
sleeps = orders(
    OperationKind.PAUSE,
    OperationKind.RESUME,
    OperationKind.RELEASE_RESOURCES,
    OperationKind.RESTORE_RESOURCES,
)


def drops_kv(can: Capabilities) -> bool:
    kept = can.resources.get(ResourceKind.KV_CACHE, frozenset())
    return sleeps(can) and ContentPolicy.DISCARD in kept and not can.resources_together


def updates(can: Capabilities) -> bool:
    """A pause is what makes an update safe, so that there is none without."""
    known = {WeightTransferBackend.NCCL.value, WeightTransferBackend.DISK.value}
    ordered = OperationKind.UPDATE_WEIGHTS in can.operations
    return pauses(can) and ordered and not known.isdisjoint(ways(can))


def updates_drafts(can: Capabilities) -> bool:
    return updates(can) and Component.DRAFT in can.components


def updates_by_disk(can: Capabilities) -> bool:
    ordered = OperationKind.UPDATE_WEIGHTS in can.operations
    return pauses(can) and ordered and WeightTransferBackend.DISK in ways(can)


def updates_by_group(can: Capabilities) -> bool:
    ordered = OperationKind.UPDATE_WEIGHTS in can.operations
    return pauses(can) and ordered and WeightTransferBackend.NCCL in ways(can)


def updates_by_payload(can: Capabilities) -> bool:
    ordered = OperationKind.UPDATE_WEIGHTS in can.operations
    offered = WeightTransferBackend.ENGINE_PAYLOAD in ways(can)
    return pauses(can) and ordered and offered and SGLANG_TENSORS in can.payload_formats


def updates_in_pieces(can: Capabilities) -> bool:
    return updates_by_group(can) or updates_by_payload(can)


def profiles(can: Capabilities) -> bool:
    return OperationKind.PROFILE in can.operations and ProfilerKind.TORCH in can.profiler_kinds


def reshapes(name: ReconfigurableField) -> Backed:
    ordered = orders(OperationKind.RECONFIGURE_SERVING)
    return lambda can: ordered(can) and name in can.reconfigurable


scales = reshapes(ReconfigurableField.DATA_PARALLEL_SIZE)
