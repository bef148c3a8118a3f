"""What an engine says of itself, as domain values. Fields are taken by name, one by one: what an
engine adds in a free-form field (`extra`, `attributes`) may hold its secrets and stays there."""

from __future__ import annotations

from datetime import datetime

from google.protobuf import struct_pb2

from app.backends.spelling import (
    Malformed,
    count_of,
    text_of,
    time_of,
    value_of,
    values_of,
    word,
    words,
)
from app.domain.capabilities import Capabilities, Limits
from app.domain.facts import EngineFacts, LoraFact, PauseFact, ProfileFact, WeightsFact
from app.domain.kinds import (
    Admission,
    CacheKind,
    ContentPolicy,
    EngineRole,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    RevisionSource,
    WeightsState,
)
from app.domain.operation import JsonObject, JsonValue
from app.rpc.openengine.v1 import admin_pb2, kv_pb2, model_pb2, server_pb2

_UNWELL = frozenset({admin_pb2.RANK_STATE_FAILED, admin_pb2.RANK_STATE_UNKNOWN})


def capabilities_of(profile: admin_pb2.AdminProfile) -> Capabilities:
    kinds = admin_pb2.AdminOperationKind
    return Capabilities(
        operations=frozenset(values_of(kinds, (s.kind for s in profile.operations), OperationKind)),
        cancellable=frozenset(
            values_of(kinds, (s.kind for s in profile.operations if s.cancellable), OperationKind)
        ),
        cache_kinds=frozenset(values_of(admin_pb2.CacheKind, profile.cache_kinds, CacheKind)),
        resources={
            kind: frozenset(values_of(admin_pb2.ContentPolicy, support.content, ContentPolicy))
            for support in profile.resources
            if (kind := value_of(admin_pb2.ResourceKind, support.kind, ResourceKind)) is not None
        },
        pause_modes=frozenset(values_of(admin_pb2.PauseMode, profile.pause_modes, PauseMode)),
        new_requests=frozenset(values_of(admin_pb2.NewRequests, profile.new_requests, NewRequests)),
        drain_rules=frozenset(words(admin_pb2.DrainRule, profile.drain_rules)),
        weight_sources=frozenset(words(admin_pb2.WeightSourceKind, profile.weight_sources)),
        weight_sessions=frozenset(words(admin_pb2.WeightTransferBackend, profile.weight_sessions)),
        payload_formats=frozenset(profile.payload_formats),
        cache_policies=frozenset(words(admin_pb2.CachePolicy, profile.cache_policies)),
        components=frozenset(words(admin_pb2.Component, profile.components)),
        profiler_kinds=frozenset(words(admin_pb2.ProfilerKind, profile.profiler_kinds)),
        reconfigurable=frozenset(words(admin_pb2.ReconfigurableField, profile.reconfigurable)),
        models=tuple(text_of(name) for name in profile.models),
        world_size=max(profile.world_size, 1),
        limits=_limits_of(profile.limits),
    )


def _limits_of(limits: admin_pb2.AdminLimits) -> Limits:
    return Limits(
        max_message_bytes=count_of(limits.max_message_bytes),
        operations_kept=count_of(limits.operations_kept),
        key_retention_ms=count_of(limits.key_retention_ms),
        default_deadline_ms=count_of(limits.default_deadline_ms),
        max_deadline_ms=count_of(limits.max_deadline_ms),
        default_hold_limit_ms=count_of(limits.default_hold_limit_ms),
        max_hold_limit_ms=count_of(limits.max_hold_limit_ms),
        max_held_requests=count_of(limits.max_held_requests),
    )


def facts_of(profile: admin_pb2.AdminProfile, observed_at: datetime) -> EngineFacts:
    """Raises Malformed for a profile without the two things everything else rests on: who
    answers, and its state."""
    if not profile.instance_id or not profile.HasField("state"):
        raise Malformed("a profile without instance id or state")
    state = profile.state
    source = value_of(admin_pb2.RevisionSource, profile.revision_source, RevisionSource)
    admission = value_of(admin_pb2.AdmissionState, state.admission, Admission)
    role = value_of(server_pb2.EngineRole, state.role, EngineRole)
    return EngineFacts(
        instance_id=text_of(profile.instance_id),
        revision=count_of(profile.revision),
        # An engine that does not say so is not taken to fence its other clients.
        revision_source=source or RevisionSource.GATEWAY,
        admission=admission or Admission.UNKNOWN,
        pause=_pause_of(state.pause) if state.HasField("pause") else None,
        pause_epoch=count_of(profile.pause_epoch),
        released=frozenset(values_of(admin_pb2.ResourceKind, state.released, ResourceKind)),
        release_epoch=count_of(profile.release_epoch),
        weights=WeightsFact(
            version=text_of(state.weights.version) or None,
            state=value_of(admin_pb2.WeightsState, state.weights.state, WeightsState)
            or WeightsState.UNKNOWN,
            updates_since_flush=count_of(state.weights.updates_since_flush),
        ),
        role=role or EngineRole.UNKNOWN,
        profile=ProfileFact(
            id=text_of(state.profile.profile_id),
            kind=word(admin_pb2.ProfilerKind, state.profile.kind) or "unknown",
            state=word(admin_pb2.ProfileState, state.profile.state) or "unknown",
        )
        if state.HasField("profile")
        else None,
        loras=tuple(
            LoraFact(text_of(lora.lora_name), lora.lora_id, text_of(lora.source_path))
            for lora in state.loras
        ),
        open_operations=tuple(
            text_of(known.idempotency_key or known.operation_id) for known in state.open_operations
        ),
        observed_at=observed_at,
    )


def _pause_of(pause: admin_pb2.PauseStatus) -> PauseFact:
    mode = value_of(admin_pb2.PauseMode, pause.mode, PauseMode)
    if mode is None:
        raise Malformed("a pause without a mode")
    new_requests = value_of(admin_pb2.NewRequests, pause.new_requests, NewRequests)
    return PauseFact(
        mode=mode,
        epoch=count_of(pause.epoch),
        by=text_of(pause.idempotency_key),
        since=time_of(pause.since_unix_nanos),
        new_requests=new_requests or NewRequests.HOLD,
        hold_limit_ms=count_of(pause.hold_limit_ms) or None,
        requests_kept=count_of(pause.requests_kept),
        requests_held=count_of(pause.requests_held),
    )


def troubles_of(profile: admin_pb2.AdminProfile) -> tuple[str, ...]:
    """What is not well although the engine answers. Paused or released is not sick."""
    found = []
    if any(rank.state == admin_pb2.RANK_STATE_FAILED for rank in profile.state.ranks):
        found.append("ranks_failed")
    if any(rank.state in _UNWELL for rank in profile.state.ranks):
        found.append("ranks_unwell")
    if profile.state.weights.state == admin_pb2.WEIGHTS_STATE_INCONSISTENT:
        found.append("weights_inconsistent")
    return tuple(found)


def info_of(info: server_pb2.ServerInfo) -> JsonObject:
    parallel, room = info.parallelism, info.capacity
    return {
        "engine_name": text_of(info.engine_name),
        "engine_version": text_of(info.engine_version),
        "role": word(server_pb2.EngineRole, info.engine_role) or "unknown",
        "instance_id": text_of(info.instance_id),
        "models": [text_of(name) for name in info.supported_models],
        "schema_revision": info.schema_revision,
        "schema_release": text_of(info.schema_release),
        "parallelism": _present(
            parallel,
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "decode_context_parallel_size",
        ),
        "capacity": _present(
            room,
            "kv_block_size",
            "total_kv_blocks",
            "max_running_requests",
            "max_batched_tokens",
            "max_loras",
        ),
    }


def model_of(model: model_pb2.ModelInfo) -> JsonObject:
    generation = model.generation
    return {
        "model_id": text_of(model.model_id),
        "served_model_name": text_of(model.served_model_name),
        "aliases": [text_of(name) for name in model.served_model_aliases],
        "tokenizer_modes": [text_of(name) for name in model.tokenizer_modes],
        "reasoning_parser": text_of(model.reasoning_parser) or None,
        "tool_call_parser": text_of(model.tool_call_parser) or None,
        **_present(
            model,
            "max_context_length",
            "max_output_tokens",
            "supports_text_input",
            "supports_token_ids_input",
            "supports_lora",
            "supports_multimodal",
        ),
        "generation": _present(
            generation,
            "max_num_sequences",
            "supports_priority",
            "supports_stop_in_output",
            "supports_cache_salt",
            "supports_prefix_cache_bypass",
        ),
    }


_LOAD = (
    "running_requests",
    "queued_requests",
    "active_kv_sessions",
    "used_kv_blocks",
    "total_kv_blocks",
    "running_tokens",
    "waiting_tokens",
    "prefill_batch_size",
    "decode_batch_size",
)
_RANK_LOAD = (
    "data_parallel_rank",
    "running_requests",
    "queued_requests",
    "used_kv_blocks",
    "total_kv_blocks",
    "prefill_batch_size",
    "decode_batch_size",
)


_RANK_MEMORY = ("rank", "weights_bytes", "kv_cache_bytes", "kept_bytes", "in_use_bytes")
_RANKS_AT_MOST = 65_536


def load_of(load: server_pb2.LoadInfo) -> JsonObject:
    """A number that the engine does not give is absent, never 0."""
    ranks: list[JsonValue] = [_present(rank, *_RANK_LOAD) for rank in load.ranks]
    found = {"instance_id": text_of(load.instance_id), **_present(load, *_LOAD), "ranks": ranks}
    memory = _memory_of(load)
    return {**found, "memory": memory} if memory else found


def _memory_of(load: server_pb2.LoadInfo) -> list[JsonValue]:
    """Of the free-form field these numbers of each rank, and nothing that is none."""
    told = load.attributes.fields.get("memory")
    rows = [] if told is None else [one.struct_value.fields for one in told.list_value.values]
    found: list[JsonValue] = []
    for row in rows[:_RANKS_AT_MOST]:
        numbers = {name: _whole(row[name]) for name in _RANK_MEMORY if name in row}
        if numbers.get("rank") is not None:
            found.append({name: one for name, one in numbers.items() if one is not None})
    return found


def _whole(value: struct_pb2.Value) -> int | None:
    """A count that JSON can tell from its neighbours."""
    number = value.number_value if value.HasField("number_value") else -1.0
    return int(number) if 0 <= number < 2**53 and number == int(number) else None


def kv_sources_of(found: kv_pb2.GetKvEventSourcesResponse) -> tuple[JsonObject, ...]:
    return tuple(
        {
            "transport": text_of(source.transport),
            "endpoint": {
                "host": text_of(source.endpoint_addr.host),
                "port": source.endpoint_addr.port,
                "protocol": text_of(source.endpoint_addr.protocol),
            }
            if source.HasField("endpoint_addr")
            else None,
            "topic": text_of(source.topic),
            "replay_endpoint": text_of(source.replay_endpoint) or None,
            "encoding": text_of(source.encoding),
            **_present(
                source,
                "data_parallel_rank",
                "schema_version",
                "buffer_steps",
                "hwm",
                "max_queue_size",
            ),
        }
        for source in found.sources
    )


def _present(message: object, *names: str) -> dict[str, JsonValue]:
    """The optional fields that are set."""
    return {
        name: count_of(getattr(message, name))
        for name in names
        if message.HasField(name)  # type: ignore[attr-defined]
    }
