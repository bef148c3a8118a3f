"""What the sidecar offers of an engine: what is there, and what it was allowed to order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.domain.capabilities import Capabilities
from app.domain.engine_payloads import SGLANG_TENSORS
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
from app.sidecars.checkpoints import folder_of
from app.sidecars.sglang.discovery import Discovered

_LORAS = ("/load_lora_adapter", "/unload_lora_adapter")
_MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")
_SESSION = ("/begin_weight_update", "/end_weight_update")
_PAYLOADS = (*_SESSION, "/update_weights_from_tensor", "/update_weight_version")
_GROUP = ("/init_weights_update_group", "/update_weights_from_distributed",
          "/destroy_weights_update_group", "/update_weight_version")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """`models` and `root`: those that it was started with. `profile_root`: below which profiles may
    be written."""

    found: Discovered
    allowed: Allowed
    models: tuple[str, ...]
    root: str
    profile_root: Path | None = None

    def capabilities(self) -> Capabilities:
        found, operations = self.found, set[OperationKind]()
        caches = frozenset({CacheKind.PREFIX}) if found.has("/flush_cache") else frozenset()
        if caches:
            operations.add(OperationKind.FLUSH_CACHES)
        pauses = found.has("/pause_generation", "/continue_generation", "/flush_cache")
        if pauses:
            operations |= {OperationKind.PAUSE, OperationKind.RESUME}
        if found.has("/abort_request"):
            operations.add(OperationKind.ABORT_REQUESTS)
        resources = self._resources() if pauses else {}
        if resources:
            operations |= {OperationKind.RELEASE_RESOURCES, OperationKind.RESTORE_RESOURCES}
        sources = self._sources() if pauses else frozenset()
        sessions = self._sessions() if pauses else frozenset()
        by_payload = WeightTransferBackend.ENGINE_PAYLOAD in sessions
        updates = bool(sources or sessions)
        if updates:
            operations.add(OperationKind.UPDATE_WEIGHTS)
        if self.takes_adapters:
            operations |= {OperationKind.LOAD_LORA, OperationKind.UNLOAD_LORA}
        profiles = found.has("/start_profile", "/stop_profile") and self.profile_root is not None
        if profiles:
            operations.add(OperationKind.PROFILE)
        fields = self._fields() if pauses else frozenset()
        if fields:
            operations.add(OperationKind.RECONFIGURE_SERVING)
        cancellable = {
            OperationKind.FLUSH_CACHES,
            OperationKind.UPDATE_WEIGHTS,
            OperationKind.PROFILE,
        }
        return Capabilities(
            operations=frozenset(operations),
            cancellable=frozenset(cancellable) & operations,
            cache_kinds=caches,
            resources=resources,
            pause_modes=frozenset(PauseMode) if pauses else frozenset(),
            # Requests that clients send to SGLang itself wait there under any pause: a refusal
            # cannot be promised.
            new_requests=frozenset({NewRequests.HOLD}),
            # Nor can it be told in time whether such requests are in flight.
            drain_rules=frozenset({DrainRule.WAIT, DrainRule.ABORT}),
            weight_sources=sources,
            weight_sessions=sessions,
            payload_formats=frozenset({SGLANG_TENSORS}) if by_payload else frozenset(),
            cache_policies=frozenset(CachePolicy) if updates else frozenset(),
            components=self._components() if updates else frozenset(),
            profiler_kinds=frozenset({ProfilerKind.TORCH}) if profiles else frozenset(),
            reconfigurable=fields,
            models=self.models,
            world_size=found.world_size,
        )

    @property
    def takes_adapters(self) -> bool:
        seen = bool(self.allowed.lora_roots) and folder_of(self.root) is not None
        return seen and self.found.has(*_LORAS) and self.found.adapters

    def _resources(self) -> dict[ResourceKind, frozenset[ContentPolicy]]:
        found = self.found
        if not found.has(*_MEMORY) or not (found.saves or self.allowed.unconfigured_release):
            return {}
        either = frozenset(ContentPolicy)
        kept = either if found.backs_up or not found.saves else frozenset({ContentPolicy.DISCARD})
        shared = {} if found.locked else {ResourceKind.WEIGHTS: kept}
        return {
            **shared,
            ResourceKind.KV_CACHE: either,
            ResourceKind.EXECUTION_GRAPHS: either,
        }

    @property
    def _known(self) -> bool:
        """Whether what is sent can be compared with what serves. SGLang ends with what does not
        fit, so that nothing is sent blindly."""
        return folder_of(self.root) is not None and not self.found.locked

    def _sources(self) -> frozenset[str]:
        found, sources = self.found, set[str]()
        if not self._known:
            return frozenset()
        # A checkpoint is put into the draft model too, whether it is one of a draft model or not.
        if found.has("/update_weights_from_disk") and found.draft_root is None:
            sources |= {WeightSourceKind.DISK} if self.allowed.weights_roots else set()
        if found.data_parallel_size > 1 or not found.has(*_SESSION):
            return frozenset(sources)
        if found.has("/update_weights_from_tensor") and found.pipeline_parallel_size == 1:
            sources |= {WeightSourceKind.INLINE, WeightSourceKind.SHARED_MEMORY}
        if found.has(*_GROUP) and self.allowed.rendezvous:
            sources.add(WeightSourceKind.DISTRIBUTED)
        return frozenset(sources)

    def _sessions(self) -> frozenset[str]:
        """Not by IPC: what the engine takes there are sockets of the trainer's own."""
        found, ways = self.found, set[str]()
        if WeightSourceKind.DISTRIBUTED in self._sources():
            ways.add(WeightTransferBackend.NCCL)
        single = found.data_parallel_size == found.pipeline_parallel_size == 1
        if self.allowed.pickled and single and not found.locked and found.has(*_PAYLOADS):
            ways.add(WeightTransferBackend.ENGINE_PAYLOAD)
        return frozenset(ways)

    def _components(self) -> frozenset[str]:
        draft = self.found.draft_root
        known = draft is not None and folder_of(draft) is not None
        return frozenset({Component.TARGET, *({Component.DRAFT} if known else ())})

    def _fields(self) -> frozenset[str]:
        found, fields = self.found, set[str]()
        if found.switches and found.has("/pd_role_switch"):
            fields.add(ReconfigurableField.ROLE)
        if found.elastic and found.has("/scale_elastic_ep", "/is_scaling_elastic_ep"):
            fields.add(ReconfigurableField.DATA_PARALLEL_SIZE)
        return frozenset(fields)

    def describe(self) -> EngineDescription:
        found = self.found
        features = {
            Feature.MIN_P,
            Feature.FREQUENCY_PENALTY,
            Feature.PRESENCE_PENALTY,
            Feature.REPETITION_PENALTY,
        }
        if self.takes_adapters:
            features.add(Feature.LORA)
        longest, tokens = found.context_length, found.total_tokens
        return EngineDescription(
            name="sglang",
            version=found.version,
            models=self.models,
            tensor_parallel_size=found.tensor_parallel_size,
            pipeline_parallel_size=found.pipeline_parallel_size,
            data_parallel_size=found.data_parallel_size,
            kv_block_size=found.page_size,
            total_kv_blocks=None if tokens is None else tokens // found.page_size,
            max_running_requests=found.max_running,
            max_batched_tokens=found.max_batched_tokens,
            max_context_length=longest,
            max_output_tokens=None if longest is None else longest - 1,
            max_loras=found.lora_slots if self.takes_adapters else None,
            features=frozenset(features),
        )
