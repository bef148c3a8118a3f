"""What an engine says of itself over the core `Control` service."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.capabilities import Capabilities
from app.domain.kinds import DrainRule, NewRequests, OperationKind, PauseMode
from app.enginekit.runtime import EngineDescription, Feature
from app.rpc.openengine.v1 import model_pb2, server_pb2
from app.sidecars.answers import shown
from app.sidecars.http import WrongAnswer
from app.sidecars.native.client import NativeClient

_MOST_MODELS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """`model`: of the first one."""

    server: server_pb2.ServerInfo
    model: model_pb2.ModelInfo

    @property
    def version(self) -> str:
        return shown(self.server.engine_version)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(shown(name) for name in self.server.supported_models[:_MOST_MODELS])

    def is_of(self, server: server_pb2.ServerInfo) -> bool:
        """Whether that is still this process, in this shape: one that has grown offers other ranks
        and other models, which a life of a sidecar cannot."""
        before = self.server
        return (
            server.instance_id == before.instance_id
            and server.parallelism == before.parallelism
            and server.supported_models == before.supported_models
        )

    @property
    def world_size(self) -> int:
        shape = self.server.parallelism
        found = 1
        for size in (
            shape.tensor_parallel_size,
            shape.pipeline_parallel_size,
            shape.data_parallel_size,
        ):
            found *= max(size, 1)
        return found


async def discover(client: NativeClient) -> Discovered:
    """Raises CallError."""
    server = await client.server_info()
    if not server.supported_models or not server.instance_id:
        raise WrongAnswer("the engine names no model, or not which process it is")
    if server.extra.fields["openengine_admin"].bool_value:
        raise WrongAnswer("the engine has an admin service of its own: register that")
    return Discovered(server=server, model=await client.model_info(server.supported_models[0]))


def capabilities_of(found: Discovered, *, only_way: bool) -> Capabilities:
    """`only_way`: nobody reaches the engine but through the sidecar, whose gate is its pause."""
    pauses = {OperationKind.PAUSE, OperationKind.RESUME} if only_way else set()
    return Capabilities(
        operations=frozenset({OperationKind.ABORT_REQUESTS, *pauses}),
        pause_modes=frozenset({PauseMode.DRAIN, PauseMode.ABORT}) if only_way else frozenset(),
        new_requests=frozenset(NewRequests),
        drain_rules=frozenset(DrainRule),
        models=found.models,
        world_size=found.world_size,
    )


def describe(found: Discovered) -> EngineDescription:
    shape, room = found.server.parallelism, found.server.capacity
    model, generation = found.model, found.model.generation
    top = generation.output_logprobs.max_top_n if generation.output_logprobs.supported else None
    return EngineDescription(
        name=shown(found.server.engine_name),
        version=found.version,
        models=found.models,
        tensor_parallel_size=max(shape.tensor_parallel_size, 1),
        pipeline_parallel_size=max(shape.pipeline_parallel_size, 1),
        data_parallel_size=max(shape.data_parallel_size, 1),
        kv_block_size=room.kv_block_size or None,
        total_kv_blocks=room.total_kv_blocks or None,
        max_running_requests=room.max_running_requests or None,
        max_batched_tokens=room.max_batched_tokens or None,
        max_context_length=model.max_context_length or None,
        max_output_tokens=model.max_output_tokens or None,
        max_top_logprobs=top,
        max_sequences=max(generation.max_num_sequences, 1),
        features=_features(model),
    )


def _features(model: model_pb2.ModelInfo) -> frozenset[Feature]:
    """Sampling has no flags of its own: the engine refuses what it does not know."""
    generation = model.generation
    told = {
        Feature.PARALLEL_SEQUENCES: generation.max_num_sequences > 1,
        Feature.PROMPT_LOGPROBS: generation.prompt_logprobs.supported,
        Feature.OUTPUT_LOGPROBS: generation.output_logprobs.supported,
        Feature.GUIDED_DECODING: generation.guided_decoding.supported,
        Feature.CACHE_SALT: generation.supports_cache_salt,
        Feature.PREFIX_CACHE_BYPASS: generation.supports_prefix_cache_bypass,
        Feature.MEDIA: model.supports_multimodal,
        Feature.LORA: model.supports_lora,
    }
    always = {
        Feature.MIN_P,
        Feature.FREQUENCY_PENALTY,
        Feature.PRESENCE_PENALTY,
        Feature.REPETITION_PENALTY,
    }
    return frozenset(always | {feature for feature, there in told.items() if there})
