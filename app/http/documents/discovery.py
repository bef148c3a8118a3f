"""What an engine says when it is asked."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field, JsonValue

from app.domain.capabilities import Capabilities
from app.domain.facts import EngineFacts
from app.domain.kinds import WeightsState

Fields = dict[str, JsonValue]


class LimitsDocument(BaseModel):
    """0: not limited, or not told."""

    max_message_bytes: int
    operations_kept: int
    key_retention_ms: int
    default_deadline_ms: int
    max_deadline_ms: int
    default_hold_limit_ms: int
    max_hold_limit_ms: int
    max_held_requests: int


class CapabilitiesDocument(BaseModel):
    operations: list[str]
    cancellable: list[str]
    cache_kinds: list[str]
    resources: dict[str, list[str]] = Field(description="Kind to content policies")
    resources_together: bool = Field(description="They are released all at once, or not at all")
    pause_modes: list[str]
    new_requests: list[str]
    drain_rules: list[str]
    weight_sources: list[str]
    weight_sessions: list[str]
    payload_formats: list[str] = Field(description="Of sessions by `engine_payload`")
    cache_policies: list[str]
    components: list[str]
    profiler_kinds: list[str]
    reconfigurable: list[str]
    abort_all: bool = Field(description="Whether requests can be ended without being named")
    models: list[str]
    world_size: int
    limits: LimitsDocument

    @classmethod
    def of(cls, can: Capabilities) -> CapabilitiesDocument:
        limits = can.limits
        return cls(
            operations=sorted(can.operations),
            cancellable=sorted(can.cancellable),
            cache_kinds=sorted(can.cache_kinds),
            resources={k.value: sorted(policies) for k, policies in can.resources.items()},
            resources_together=can.resources_together,
            pause_modes=sorted(can.pause_modes),
            new_requests=sorted(can.new_requests),
            drain_rules=sorted(can.drain_rules),
            weight_sources=sorted(can.weight_sources),
            weight_sessions=sorted(can.weight_sessions),
            payload_formats=sorted(can.payload_formats),
            cache_policies=sorted(can.cache_policies),
            components=sorted(can.components),
            profiler_kinds=sorted(can.profiler_kinds),
            reconfigurable=sorted(can.reconfigurable),
            abort_all=can.abort_all,
            models=list(can.models),
            world_size=can.world_size,
            limits=LimitsDocument(
                max_message_bytes=limits.max_message_bytes,
                operations_kept=limits.operations_kept,
                key_retention_ms=limits.key_retention_ms,
                default_deadline_ms=limits.default_deadline_ms,
                max_deadline_ms=limits.max_deadline_ms,
                default_hold_limit_ms=limits.default_hold_limit_ms,
                max_hold_limit_ms=limits.max_hold_limit_ms,
                max_held_requests=limits.max_held_requests,
            ),
        )


class InfoDocument(BaseModel):
    """`info`: what the engine says of itself; its fields are the engine's."""

    engine: str
    observed_at: datetime
    info: Fields


class ModelsDocument(BaseModel):
    items: list[Fields]
    next_page_token: None = None


class LoadDocument(BaseModel):
    """`load`: running_requests, queued_requests, used_kv_blocks, total_kv_blocks and more."""

    at: datetime
    load: Fields


class LoadHistoryDocument(BaseModel):
    """Oldest first; what this gateway saw, one hour at most."""

    items: list[LoadDocument]
    next_page_token: None = None


class KvEventSourcesDocument(BaseModel):
    """transport, endpoint, topic, replay_endpoint, encoding and what else the engine gives."""

    items: list[Fields]
    next_page_token: None = None


class WeightVersionDocument(BaseModel):
    version: str | None = Field(description="null: the engine declares none")
    state: WeightsState
    updates_since_flush: int
    observed_at: datetime

    @classmethod
    def of(cls, facts: EngineFacts) -> WeightVersionDocument:
        weights = facts.weights
        return cls(
            version=weights.version,
            state=weights.state,
            updates_since_flush=weights.updates_since_flush,
            observed_at=facts.observed_at,
        )
