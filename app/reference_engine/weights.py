"""Tensors of a checkpoint: which ones a configuration demands, and reading them checked.

Names are those of the Hugging Face layout, and stay the names of the tensors inside the engine:
an order that replaces weights addresses them by the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from app.reference_engine.config import ModelConfig
from app.reference_engine.errors import (
    TensorMismatch,
    TensorMissing,
    TensorUnexpected,
)
from app.reference_engine.sharding import EMBEDDING, FINAL_NORM, LM_HEAD, Layout
from app.reference_engine.tensor_files import Entry, TensorFile
from app.reference_engine.weight_files import safetensors_files

__all__ = ["EMBEDDING", "FINAL_NORM", "LM_HEAD", "expected_shapes", "load_part", "load_weights"]

# Buffers that older exports wrote although they follow from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")
_LOADABLE = {"F32", "F16", "BF16", "F64"}


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


def load_weights(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """All demanded tensors of a checkpoint, whole; see :class:`Collected`."""
    return load_part(directory, Layout(config))


def load_part(directory: Path, layout: Layout) -> dict[str, Tensor]:
    """One rank's part of a checkpoint; only that is read."""
    collected = Collected(layout)
    for path in safetensors_files(directory):
        with TensorFile(path) as file:
            collected.take_file(file)
    return collected.complete()


class Collected:
    """Gathers one rank's part of a model, from whatever brings the tensors.

    Tensors become contiguous float32 on the CPU, checked by name, shape and type as they come.
    ``proceed`` is called before each and may raise to stop the gathering.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        check_finite: bool = False,
        proceed: Callable[[], None] = lambda: None,
    ) -> None:
        self._layout = layout
        self._shapes = expected_shapes(layout.config)
        self._check_finite = check_finite
        self._proceed = proceed
        self._weights: dict[str, Tensor] = {}

    def take_file(self, file: TensorFile) -> None:
        """Every tensor that the file's own header names."""
        for name, entry in file.entries().items():
            self.take(file, name, entry)

    def take(self, file: TensorFile, name: str, entry: Entry) -> None:
        """Read this rank's part of one tensor. Raises CheckpointError naming it."""
        self._proceed()
        if _is_redundant(name, self._layout.config):
            return
        if name not in self._shapes or name in self._weights:
            raise TensorUnexpected(name)
        if entry.shape != self._shapes[name]:
            raise TensorMismatch(name, f"of shape {self._shapes[name]}", f"{entry.shape}")
        if entry.dtype not in _LOADABLE:
            raise TensorMismatch(name, "a plain floating point tensor", _type_name(entry.dtype))
        part = file.tensor(entry, self._layout.cut(name)).to(torch.float32)
        # Each rank looks at its own part: together they have looked at every element.
        if self._check_finite and not bool(torch.isfinite(part).all()):
            raise TensorMismatch(name, "finite", "a value that is not a finite number")
        self._weights[name] = part

    def complete(self) -> dict[str, Tensor]:
        """In the order of the configuration. Raises TensorMissing."""
        for name in self._shapes:
            if name not in self._weights:
                raise TensorMissing(name)
        return {name: self._weights[name] for name in self._shapes}


def _is_redundant(name: str, config: ModelConfig) -> bool:
    if name == LM_HEAD:
        return config.tie_word_embeddings
    return name.endswith(_DERIVED_SUFFIXES)


def _type_name(dtype: str) -> str:
    """The format's word for a type in torch's, where there is one."""
    return {"I": "int", "U": "uint"}.get(dtype[:1], dtype[:1]) + dtype[1:]
