"""Checkpoints for the tests: small Llamas written by transformers itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers

from app.reference_engine.config import ModelConfig, read_config
from app.reference_engine.model import KvCache, Llama
from app.reference_engine.weights import load_weights

torch.set_num_threads(1)
logging.getLogger("transformers").setLevel(logging.ERROR)
# Typed in part only; taken as untyped as a whole.
_untyped: Any = transformers
_untyped.utils.logging.disable_progress_bar()


def random_llama(seed: int, **settings: Any) -> Any:
    """transformers' own model with random weights, biases and norms included.

    Its own initialisation leaves biases at zero and norms at one, and a decoder that forgot them
    would go unnoticed.
    """
    torch.manual_seed(seed)
    model = _untyped.LlamaForCausalLM(_untyped.LlamaConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    return model


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """What transformers computes for every position, [positions, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


def ours(directory: Path, max_positions: int) -> tuple[ModelConfig, Llama]:
    config = read_config(directory)
    return config, Llama(config, load_weights(directory, config), max_positions)


def cache_for(config: ModelConfig, blocks: int, block_size: int) -> KvCache:
    """A cache full of leftovers: whatever earlier sequences left must not shine through."""
    cache = KvCache(config, blocks, block_size)
    cache.keys[:, :, :blocks] = 1e3
    cache.values[:, :, :blocks] = -1e3
    return cache
