"""What an engine says it can do, and whether an order is within it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.domain.kinds import (
    CacheKind,
    ContentPolicy,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """0: not limited or not told."""

    max_message_bytes: int = 0
    operations_kept: int = 0
    key_retention_ms: int = 0
    default_deadline_ms: int = 0
    max_deadline_ms: int = 0
    default_hold_limit_ms: int = 0
    max_hold_limit_ms: int = 0
    max_held_requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """`resources_together`: what can be released is released all at once, or not at all.
    `payload_formats`: of its own payloads, which sessions by `engine_payload` bring.
    `abort_all`: requests can be ended without being named."""

    operations: frozenset[OperationKind] = frozenset()
    cancellable: frozenset[OperationKind] = frozenset()
    cache_kinds: frozenset[CacheKind] = frozenset()
    resources: Mapping[ResourceKind, frozenset[ContentPolicy]] = field(default_factory=dict)
    resources_together: bool = False
    pause_modes: frozenset[PauseMode] = frozenset()
    new_requests: frozenset[NewRequests] = frozenset()
    drain_rules: frozenset[str] = frozenset()
    weight_sources: frozenset[str] = frozenset()
    weight_sessions: frozenset[str] = frozenset()
    payload_formats: frozenset[str] = frozenset()
    cache_policies: frozenset[str] = frozenset()
    components: frozenset[str] = frozenset()
    profiler_kinds: frozenset[str] = frozenset()
    reconfigurable: frozenset[str] = frozenset()
    abort_all: bool = True
    models: tuple[str, ...] = ()
    world_size: int = 1
    limits: Limits = Limits()
