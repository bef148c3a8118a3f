"""Builds one rank from a checkpoint: the place where torch is set up."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from app.reference_engine.collective import Alone, Collective, RankGroup
from app.reference_engine.config import ModelConfig, read_config
from app.reference_engine.core import EngineCore
from app.reference_engine.errors import (
    CheckpointError,
    TokenizerMismatch,
    UnsupportedArchitecture,
)
from app.reference_engine.holding import Holding
from app.reference_engine.host_memory import sha256_of
from app.reference_engine.kv_cache import BlockPool
from app.reference_engine.limits import Capacity, CoreSettings, capacity_of
from app.reference_engine.messages import FirstWeights, Ready, StepPlan
from app.reference_engine.model import KvCache, Llama
from app.reference_engine.pulse import Pulse
from app.reference_engine.scheduler import Scheduler, SchedulerLimits
from app.reference_engine.shape_orders import LiveWeights
from app.reference_engine.sharding import Layout
from app.reference_engine.source_reading import read_source
from app.reference_engine.tokenizer import Tokenizer
from app.reference_engine.weight_parts import gather
from app.reference_engine.weights import load_part

# Below this many weights a step is all overhead, and handing parts of it to threads only adds.
_ONE_THREAD_PARAMETERS = 50_000_000


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """What a rank needs to work, loaded and checked."""

    config: ModelConfig
    tokenizer: Tokenizer
    capacity: Capacity
    holding: Holding
    ready: Ready

    def core(
        self, settings: CoreSettings, announce: Callable[[StepPlan], None] = lambda _plan: None
    ) -> EngineCore:
        """The first rank's: it schedules, and announces each step to the others."""
        limits = SchedulerLimits(
            block_size=settings.block_size,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_batched_tokens=settings.max_batched_tokens,
        )
        scheduler = Scheduler(limits, BlockPool(self.capacity.kv_blocks))
        return EngineCore(scheduler, self.holding, self.tokenizer, announce)


def build_rank(
    checkpoint: Path,
    settings: CoreSettings,
    rank: int = 0,
    rendezvous: Path | None = None,
    pulse: Pulse | None = None,
    earlier: FirstWeights | None = None,
) -> BuiltRank:
    """Load, check, and meet the other ranks; raises CheckpointError for what can not be served,
    PeerLost when the group does not come about. For ``earlier`` see :class:`Start`."""
    config = read_config(checkpoint)
    tokenizer = Tokenizer.load(checkpoint)
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerMismatch(tokenizer.vocab_size, config.vocab_size)
    world_size = settings.tensor_parallel_size
    device = _device(settings, rank)
    layout = Layout(config, rank, world_size)
    capacity = capacity_of(settings, config)
    weights = _weights(checkpoint, layout, earlier)
    parameters = 0
    if weights is not None:
        weights = {name: part.to(device) for name, part in weights.items()}
        parameters = sum(part.numel() for part in weights.values())
    _set_threads(settings, parameters)
    group: Collective = Alone()
    if rendezvous is not None and world_size > 1:
        group = RankGroup(rank, world_size, rendezvous, device, pulse or Pulse())
    bare = Llama(config, None, capacity.max_model_len, layout=layout, group=group, device=device)
    holding = Holding(
        bare,
        weights,
        lambda: KvCache(layout.local, capacity.kv_blocks, settings.block_size, device),
    )
    ready = Ready(
        rank=rank,
        pid=os.getpid(),
        total_kv_blocks=capacity.kv_blocks,
        max_model_len=capacity.max_model_len,
        parameters=parameters,
        weights_sha256=holding.held.sha256,
        device=device.type,
    )
    return BuiltRank(config, tokenizer, capacity, holding, ready)


def _weights(
    checkpoint: Path, layout: Layout, earlier: FirstWeights | None
) -> dict[str, Tensor] | None:
    if earlier is None:
        return load_part(checkpoint, layout)
    if isinstance(earlier, LiveWeights):
        return gather(earlier, layout)
    if not earlier.sha256:
        return None
    try:
        if earlier.source is None:
            weights = load_part(checkpoint, layout)
            sha256 = sha256_of(weights)
        else:
            found = read_source(earlier.source, layout, check_finite=False, proceed=lambda: None)
            weights, sha256 = found.weights, found.sha256
    except CheckpointError:
        return None
    # Other bytes under the same name would be another version without anybody having said so.
    return weights if sha256 == earlier.sha256 else None


def _device(settings: CoreSettings, rank: int) -> torch.device:
    there = torch.cuda.device_count() if settings.device != "cpu" else 0
    enough = there >= settings.tensor_parallel_size
    if settings.device == "cuda" and not enough:
        raise UnsupportedArchitecture("device cuda", f"{there} devices, one for each rank")
    if not there or not enough:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _set_threads(settings: CoreSettings, parameters: int) -> None:
    if settings.torch_threads is not None:
        torch.set_num_threads(settings.torch_threads)
    elif parameters < _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.tensor_parallel_size))
