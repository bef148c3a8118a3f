"""What the members say when they are asked, and what the engine is by that. Pure.

A member that has no such call says UNIMPLEMENTED, and one that was not started with the feature
FAILED_PRECONDITION: either is `None` here, not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from app.backends.spelling import count_of, text_of
from app.domain.capabilities import Capabilities
from app.domain.facts import LoraFact
from app.domain.kinds import (
    CachePolicy,
    Component,
    ContentPolicy,
    DrainRule,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    WeightSourceKind,
    WeightTransferBackend,
)
from app.domain.operation import JsonObject, JsonValue
from app.rpc.vllm import control_pb2 as pb

T = TypeVar("T")

BOTH = frozenset({ResourceKind.WEIGHTS, ResourceKind.KV_CACHE})
"""What vLLM's sleep gives back: always both."""
REFUSES_SINCE = (0, 33)
"""From this version on new requests get 503 while paused by abort or wait; before, they hang."""

MOST_RANKS = 1 << 16
"""Each is named by its number where an order fails or ends."""

_SPEAKS = {one.value: one for one in (WeightTransferBackend.NCCL, WeightTransferBackend.DISK)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReading:
    """`rank`: as registered, counted in members. `sleeping` is true of one that is only paused."""

    rank: int
    server: pb.ServerInfo
    model: pb.ModelInfo | None = None
    paused: bool | None = None
    sleeping: bool | None = None
    version: str | None = None
    loras: tuple[LoraFact, ...] | None = None

    @property
    def instance_id(self) -> str:
        return text_of(self.server.instance_id)


@dataclass(frozen=True, slots=True)
class EngineReading:
    """All members, by rank. `stale`: an order of ours keeps the engine from answering, and of its
    state there is only what was read before."""

    members: tuple[MemberReading, ...]
    stale: bool = False

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return tuple(member.instance_id for member in self.members)

    @property
    def instance_id(self) -> str:
        return ",".join(self.instance_ids)

    @property
    def paused(self) -> bool | None:
        """None: the members differ, or do not say."""
        return _common([member.paused for member in self.members])

    @property
    def sleeping(self) -> bool | None:
        return _common([member.sleeping for member in self.members])

    @property
    def version(self) -> str | None:
        return _common([member.version for member in self.members])

    @property
    def loras(self) -> tuple[LoraFact, ...]:
        """Those that every member has."""
        told = [set(member.loras or ()) for member in self.members]
        return tuple(sorted(set.intersection(*told), key=lambda lora: lora.name))

    @property
    def agrees(self) -> bool:
        """Whether the members are in the same state."""
        states = {(m.paused, m.sleeping, m.version, m.loras) for m in self.members}
        return len(states) == 1

    def ranks(self, places: set[int]) -> tuple[int, ...]:
        """The global ranks of the members at those places: dp × (tp · pp) + local."""
        found: list[int] = []
        for place in sorted(places):
            member = self.members[place]
            width = self.width(member)
            found += range(member.rank * width, (member.rank + 1) * width)
        return tuple(found)

    @property
    def world_size(self) -> int:
        return sum(self.width(member) for member in self.members)

    def width(self, member: MemberReading) -> int:
        """How many ranks stand behind one member."""
        shape = member.server.parallelism
        replicas = shape.data_parallel_size
        if len(self.members) > 1:
            replicas = shape.data_parallel_size_local
        return (
            max(shape.tensor_parallel_size, 1)
            * max(shape.pipeline_parallel_size, 1)
            * max(replicas, 1)
        )


def _common(values: list[T]) -> T | None:
    return values[0] if all(value == values[0] for value in values) else None


def adapters_of(response: pb.ListLorasResponse) -> tuple[LoraFact, ...]:
    return tuple(
        LoraFact(text_of(a.lora_name), a.lora_id, text_of(a.source_path, 4096))
        for a in sorted(response.adapters, key=lambda a: a.lora_name)
    )


def refuses_new_requests(reading: EngineReading, mode: PauseMode | None) -> bool:
    """Whether a pause of that mode makes it answer new requests with 503."""
    told = all(
        _release(member.server.engine_version) >= REFUSES_SINCE for member in reading.members
    )
    return told and mode in (PauseMode.DRAIN, PauseMode.ABORT)


def _release(version: str) -> tuple[int, ...]:
    """(0, 0): not one that can be read."""
    parts = version.split(".")[:2]
    if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in parts):
        return tuple(int(part) for part in parts)
    return (0, 0)


def capabilities_of(reading: EngineReading) -> Capabilities:
    """What every member can do."""
    members = reading.members
    rl = [member.server.rl_capabilities for member in members]
    kinds = {OperationKind.ABORT_REQUESTS, OperationKind.SHUTDOWN}
    pauses = all(member.paused is not None for member in members)
    if pauses:
        kinds |= {OperationKind.PAUSE, OperationKind.RESUME}
    sleeps = pauses and all(
        told.sleep_mode_enabled and member.sleeping is not None
        for told, member in zip(rl, members, strict=True)
    )
    if sleeps:
        kinds |= {OperationKind.RELEASE_RESOURCES, OperationKind.RESTORE_RESOURCES}
    if all(member.version is not None for member in members):
        kinds.add(OperationKind.SET_WEIGHT_VERSION)
    transfer = transfer_of(reading) if pauses else None
    if transfer is not None:
        kinds.add(OperationKind.UPDATE_WEIGHTS)
    if all(
        member.loras is not None and member.model is not None and member.model.supports_lora
        for member in members
    ):
        kinds |= {OperationKind.LOAD_LORA, OperationKind.UNLOAD_LORA}
    components = {Component.TARGET.value}
    if all(told.draft_weight_updates_enabled for told in rl):
        components.add(Component.DRAFT.value)
    refuses = refuses_new_requests(reading, PauseMode.DRAIN)
    new_requests = {NewRequests.HOLD, NewRequests.REFUSE} if refuses else {NewRequests.HOLD}
    updates = transfer is not None
    return Capabilities(
        operations=frozenset(kinds),
        cancellable=frozenset({OperationKind.UPDATE_WEIGHTS} & kinds),
        resources={kind: frozenset(ContentPolicy) for kind in BOTH} if sleeps else {},
        resources_together=sleeps,
        pause_modes=frozenset(PauseMode) if pauses else frozenset(),
        new_requests=frozenset(new_requests) if pauses else frozenset(),
        # How many requests run is not told, so that REFUSE has nothing to go by.
        drain_rules=frozenset({DrainRule.WAIT.value, DrainRule.ABORT.value} if sleeps else ()),
        weight_sources=frozenset(_sources(transfer)),
        weight_sessions=frozenset() if transfer is None else frozenset({transfer.value}),
        cache_policies=frozenset({p.value for p in CachePolicy} if updates else ()),
        components=frozenset(components if updates else ()),
        abort_all=False,
        models=_names(members[0].model),
        world_size=reading.world_size,
    )


def _sources(transfer: WeightTransferBackend | None) -> set[str]:
    if transfer is None:
        return set()
    named = transfer is WeightTransferBackend.DISK
    return {WeightSourceKind.SESSION.value} | ({WeightSourceKind.DISK.value} if named else set())


def transfer_of(reading: EngineReading) -> WeightTransferBackend | None:
    """How weights travel to all members; None: not at all, or in a way whose payload has no schema
    here. Not `ipc`, whose handles vLLM takes pickled: nothing here makes or passes on such a thing.
    """
    told = [member.server.rl_capabilities for member in reading.members]
    name = _common([one.weight_transfer_backend for one in told])
    if name is None or not all(one.weight_transfer_enabled for one in told):
        return None
    return _SPEAKS.get(name)


def _names(model: pb.ModelInfo | None) -> tuple[str, ...]:
    if model is None:
        return ()
    return tuple(text_of(name) for name in (model.served_model_name, *model.served_model_aliases))


def info_of(reading: EngineReading) -> JsonObject:
    """The first member speaks for all; `members` has what is each one's own. Raises Malformed."""
    server = reading.members[0].server
    shape = server.parallelism
    block: dict[str, JsonValue] = {}
    if server.HasField("effective_attention_block_size"):
        size = count_of(server.effective_attention_block_size)
        block["effective_attention_block_size"] = size
    told = server.rl_capabilities
    return {
        "engine_name": "vllm",
        "engine_version": text_of(server.engine_version),
        "api_version": text_of(server.api_version),
        "instance_id": reading.instance_id,
        "parallelism": {
            "tensor_parallel_size": shape.tensor_parallel_size,
            "pipeline_parallel_size": shape.pipeline_parallel_size,
            "data_parallel_size": max(shape.data_parallel_size, len(reading.members)),
            "decode_context_parallel_size": shape.decode_context_parallel_size,
            "world_size": reading.world_size,
        },
        "capacity": {
            "max_model_len": server.max_model_len,
            "kv_block_size": server.kv_block_size,
            "total_kv_blocks": count_of(server.total_kv_blocks),
            "max_running_requests": count_of(server.max_running_requests),
            "max_batched_tokens": count_of(server.max_batched_tokens),
            "max_loras": server.max_loras,
            **block,
        },
        "rl_capabilities": {
            "weight_transfer_enabled": told.weight_transfer_enabled,
            "weight_transfer_backend": text_of(told.weight_transfer_backend),
            "sleep_mode_enabled": told.sleep_mode_enabled,
            "draft_weight_updates_enabled": told.draft_weight_updates_enabled,
        },
        "members": [
            {
                "rank": member.rank,
                "instance_id": member.instance_id,
                "data_parallel_rank": member.server.parallelism.data_parallel_rank,
            }
            for member in reading.members
        ],
    }


def models_of(reading: EngineReading) -> tuple[JsonObject, ...]:
    model = reading.members[0].model
    if model is None:
        return ()
    return (
        {
            "model_id": text_of(model.model_id, 4096),
            "served_model_name": text_of(model.served_model_name),
            "aliases": [text_of(name) for name in model.served_model_aliases],
            "supports_text_input": model.supports_text_input,
            "supports_token_ids_input": model.supports_token_ids_input,
            "supports_lora": model.supports_lora,
            "supports_multimodal": model.supports_multimodal,
            "reasoning_parser": text_of(model.reasoning_parser) or None,
            "tool_call_parser": text_of(model.tool_call_parser) or None,
        },
    )


def kv_sources_of(rank: int, response: pb.GetKvEventSourcesResponse) -> list[JsonObject]:
    found: list[JsonObject] = []
    for source in response.sources:
        of = source.data_parallel_rank if source.HasField("data_parallel_rank") else rank
        found.append(
            {
                "transport": text_of(source.transport),
                "endpoint": text_of(source.endpoint),
                "topic": text_of(source.topic),
                "replay_endpoint": text_of(source.replay_endpoint) or None,
                "data_parallel_rank": of,
                "encoding": text_of(source.encoding),
                "schema_version": source.schema_version,
                "buffer_steps": source.buffer_steps,
                "hwm": source.hwm,
                "max_queue_size": source.max_queue_size,
            }
        )
    return found
