"""What the sidecar offers of an engine: what is there, and what it was allowed to order."""

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
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightSourceKind,
    WeightTransferBackend,
)
from app.enginekit.runtime import EngineDescription, Feature
from app.sidecars.allowed import Allowed
from app.sidecars.vllm.discovery import Discovered

CACHES = {
    CacheKind.PREFIX: "/reset_prefix_cache",
    CacheKind.MULTIMODAL: "/reset_mm_cache",
    CacheKind.ENCODER: "/reset_encoder_cache",
}
# Backends that read safetensors from a path, each in the process of the engine.
READS_FILES = frozenset({"disk", "file"})
_UPDATES = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
            "/finish_weight_update", "/weight_info")  # fmt: skip
_LORAS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def capabilities_of(found: Discovered, allowed: Allowed) -> Capabilities:
    operations: set[OperationKind] = set()
    caches = frozenset(kind for kind, path in CACHES.items() if found.has(path))
    if caches:
        operations.add(OperationKind.FLUSH_CACHES)
    pauses = found.has("/pause", "/resume", "/is_paused")
    if pauses:
        operations |= {OperationKind.PAUSE, OperationKind.RESUME}
    if found.has("/abort_requests"):
        operations.add(OperationKind.ABORT_REQUESTS)
    resources = _resources(found, allowed) if pauses else {}
    if resources:
        operations |= {OperationKind.RELEASE_RESOURCES, OperationKind.RESTORE_RESOURCES}
    sources = _sources(found, allowed) if pauses else frozenset()
    sessions = _sessions(found, allowed) if pauses else frozenset()
    if sources or sessions:
        operations.add(OperationKind.UPDATE_WEIGHTS)
    if takes_adapters(found, allowed):
        operations |= {OperationKind.LOAD_LORA, OperationKind.UNLOAD_LORA}
    profiles = found.has("/start_profile", "/stop_profile") and found.profile_dir is not None
    if profiles:
        operations.add(OperationKind.PROFILE)
    scales = pauses and found.elastic and found.has("/scale_elastic_ep", "/get_world_size")
    if scales:
        operations.add(OperationKind.RECONFIGURE_SERVING)
    return Capabilities(
        operations=frozenset(operations),
        cancellable=frozenset({OperationKind.UPDATE_WEIGHTS, OperationKind.PROFILE}) & operations,
        cache_kinds=caches,
        resources=resources,
        pause_modes=frozenset(PauseMode) if pauses else frozenset(),
        # Requests that clients send to vLLM itself wait there, or are refused, as its version has
        # it; a refusal cannot be promised.
        new_requests=frozenset({NewRequests.HOLD}),
        # Nor can it be told in time whether such requests are in flight.
        drain_rules=frozenset({DrainRule.WAIT, DrainRule.ABORT}),
        weight_sources=sources,
        weight_sessions=sessions,
        cache_policies=frozenset(CachePolicy) if sources or sessions else frozenset(),
        components=_components(found) if sources or sessions else frozenset(),
        profiler_kinds=frozenset({ProfilerKind.TORCH}) if profiles else frozenset(),
        reconfigurable=frozenset({ReconfigurableField.DATA_PARALLEL_SIZE})
        if scales
        else frozenset(),
        models=found.models,
        world_size=found.world_size,
    )


def takes_adapters(found: Discovered, allowed: Allowed) -> bool:
    return bool(allowed.lora_roots) and found.has(*_LORAS) and found.lora_slots is not None


def _resources(found: Discovered, allowed: Allowed) -> dict[ResourceKind, frozenset[ContentPolicy]]:
    if not found.has("/sleep", "/wake_up", "/is_sleeping"):
        return {}
    if not (found.sleeps or allowed.unconfigured_release):
        return {}
    return {
        ResourceKind.WEIGHTS: frozenset(ContentPolicy),
        ResourceKind.KV_CACHE: frozenset(ContentPolicy),
    }


def _sources(found: Discovered, allowed: Allowed) -> frozenset[str]:
    if not found.has(*_UPDATES):
        return frozenset()
    if found.transfer in READS_FILES and allowed.weights_roots:
        return frozenset({WeightSourceKind.DISK})
    return frozenset()


def _sessions(found: Discovered, allowed: Allowed) -> frozenset[str]:
    """Not by IPC: its handles go to the engine as pickles, which nothing of ours passes on."""
    if found.has(*_UPDATES) and found.transfer == "nccl" and allowed.rendezvous:
        return frozenset({WeightTransferBackend.NCCL})
    return frozenset()


def _components(found: Discovered) -> frozenset[str]:
    draft = found.draft and found.has("/start_draft_weight_update")
    return frozenset({Component.TARGET, *({Component.DRAFT} if draft else ())})


def describe(found: Discovered, allowed: Allowed) -> EngineDescription:
    features = {
        Feature.MIN_P,
        Feature.FREQUENCY_PENALTY,
        Feature.PRESENCE_PENALTY,
        Feature.REPETITION_PENALTY,
        Feature.CACHE_SALT,
    }
    if takes_adapters(found, allowed):
        features.add(Feature.LORA)
    longest = found.max_model_len
    return EngineDescription(
        name="vllm",
        version=found.version,
        models=found.models,
        tensor_parallel_size=found.tensor_parallel_size,
        pipeline_parallel_size=found.pipeline_parallel_size,
        data_parallel_size=found.data_parallel_size,
        kv_block_size=found.block_size,
        total_kv_blocks=found.total_blocks,
        max_running_requests=found.max_running,
        max_batched_tokens=found.max_batched_tokens,
        max_context_length=longest,
        max_output_tokens=None if longest is None else longest - 1,
        max_loras=found.lora_slots if takes_adapters(found, allowed) else None,
        features=frozenset(features),
    )
