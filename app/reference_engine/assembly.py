"""Builds one rank's core from a checkpoint: the place where torch is set up."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from app.reference_engine.config import read_config
from app.reference_engine.core import EngineCore
from app.reference_engine.errors import TokenizerMismatch
from app.reference_engine.kv_cache import BlockPool
from app.reference_engine.limits import CoreSettings, capacity_of
from app.reference_engine.messages import Ready
from app.reference_engine.model import KvCache, Llama
from app.reference_engine.scheduler import Scheduler, SchedulerLimits
from app.reference_engine.tokenizer import Tokenizer
from app.reference_engine.weights import load_weights

# Below this many weights a step is all overhead, and handing parts of it to threads only adds.
_ONE_THREAD_PARAMETERS = 50_000_000


def build_core(checkpoint: Path, settings: CoreSettings, rank: int) -> tuple[EngineCore, Ready]:
    """Load and check everything; raises CheckpointError for what can not be served."""
    config = read_config(checkpoint)
    tokenizer = Tokenizer.load(checkpoint)
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerMismatch(tokenizer.vocab_size, config.vocab_size)
    capacity = capacity_of(settings, config)
    model = Llama(config, load_weights(checkpoint, config), capacity.max_model_len)
    if settings.torch_threads is not None:
        torch.set_num_threads(settings.torch_threads)
    elif model.parameters < _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    limits = SchedulerLimits(
        block_size=settings.block_size,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_batched_tokens=settings.max_batched_tokens,
    )
    cache = KvCache(config, capacity.kv_blocks, settings.block_size)
    core = EngineCore(Scheduler(limits, BlockPool(capacity.kv_blocks)), model, cache, tokenizer)
    ready = Ready(
        rank=rank,
        pid=os.getpid(),
        total_kv_blocks=capacity.kv_blocks,
        max_model_len=capacity.max_model_len,
        parameters=model.parameters,
    )
    return core, ready
