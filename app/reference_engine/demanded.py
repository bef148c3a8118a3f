"""Which tensors a configuration demands, by name, shape and type. Pure: the front end asks too.

Names are those of the Hugging Face layout, and stay the names of the tensors inside the engine:
an order that replaces weights addresses them by the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from app.reference_engine.config import ModelConfig
from app.reference_engine.errors import TensorMismatch, TensorMissing, TensorUnexpected
from app.reference_engine.sharding import EMBEDDING, FINAL_NORM, LM_HEAD

# Buffers that older exports wrote although they follow from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")
# Types of the format that become float32.
LOADABLE = {"F32", "F16", "BF16", "F64"}


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


class Demanded:
    """What a whole model consists of, for checking what is brought."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._shapes = expected_shapes(config)

    def takes(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether the model needs it; False for what other exporters add and what follows from
        the rest. ``dtype`` in the words of safetensors. Raises CheckpointError naming it."""
        if self._is_redundant(name):
            return False
        if name not in self._shapes:
            raise TensorUnexpected(name)
        if shape != self._shapes[name]:
            raise TensorMismatch(name, f"of shape {self._shapes[name]}", f"{shape}")
        if dtype not in LOADABLE:
            raise TensorMismatch(name, "a plain floating point tensor", _type_name(dtype))
        return True

    def complete(self, names: Iterable[str]) -> tuple[str, ...]:
        """All names, in the order of the configuration. Raises TensorMissing."""
        there = set(names)
        for name in self._shapes:
            if name not in there:
                raise TensorMissing(name)
        return tuple(self._shapes)

    def check(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Of type and shape by name, whether they are a whole model. Raises CheckpointError."""
        self.complete([name for name, form in tensors.items() if self.takes(name, *form)])

    def _is_redundant(self, name: str) -> bool:
        if name == LM_HEAD:
            return self._config.tie_word_embeddings
        return name.endswith(_DERIVED_SUFFIXES)


def _type_name(dtype: str) -> str:
    """The format's word for a type in torch's, where there is one."""
    return {"I": "int", "U": "uint"}.get(dtype[:1], dtype[:1]) + dtype[1:]
