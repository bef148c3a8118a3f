"""Tensors of a checkpoint: which ones a configuration demands, and reading them checked.

Names are those of the Hugging Face layout, and stay the names of the tensors inside the engine:
an order that replaces weights addresses them by the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from app.reference_engine.config import ModelConfig, read_json
from app.reference_engine.errors import (
    CheckpointFileInvalid,
    CheckpointFileMissing,
    TensorMismatch,
    TensorMissing,
    TensorUnexpected,
)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Buffers that older exports wrote although they follow from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")
_LOADABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs, by name. A tied head has no tensor of its own."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", queries, hidden, config.attention_bias),
            ("self_attn.k_proj", keys, hidden, config.attention_bias),
            ("self_attn.v_proj", keys, hidden, config.attention_bias),
            ("self_attn.o_proj", hidden, queries, config.attention_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
    return shapes


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """The files that hold the weights: those an index names, else the single one."""
    index = directory / _INDEX
    if not index.exists():
        single = directory / _SINGLE
        if not single.is_file():
            raise CheckpointFileMissing(single)
        return (single,)
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointFileInvalid(index, "no weight_map")
    files = []
    for name in sorted(set(map(str, shard_of.values()))):
        # An index is data from outside: it must not reach files beside the checkpoint.
        if Path(name).name != name:
            raise CheckpointFileInvalid(index, f"shard name {name!r} is not a plain file name")
        if not (directory / name).is_file():
            raise CheckpointFileMissing(directory / name)
        files.append(directory / name)
    return tuple(files)


def load_weights(directory: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """All demanded tensors as float32 on the CPU, checked by name, shape and type."""
    shapes = expected_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    for file in safetensors_files(directory):
        for name, tensor in _tensors(file):
            if _is_redundant(name, config):
                continue
            if name not in shapes:
                raise TensorUnexpected(name)
            weights[name] = checked(name, tensor, shapes)
    for name in shapes:
        if name not in weights:
            raise TensorMissing(name)
    return weights


def checked(name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> torch.Tensor:
    """``tensor`` as contiguous float32, or :class:`TensorMismatch` naming it."""
    if tuple(tensor.shape) != shapes[name]:
        raise TensorMismatch(name, f"of shape {shapes[name]}", f"{tuple(tensor.shape)}")
    if tensor.dtype not in _LOADABLE:
        raise TensorMismatch(name, "a plain floating point tensor", str(tensor.dtype))
    return tensor.to(torch.float32).contiguous()


def _is_redundant(name: str, config: ModelConfig) -> bool:
    if name == LM_HEAD:
        return config.tie_word_embeddings
    return name.endswith(_DERIVED_SUFFIXES)


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping: it has no __iter__)
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointFileInvalid(file, str(error)) from error
