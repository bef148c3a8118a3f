"""What a checkpoint's ``config.json`` says, as far as this decoder needs it.

Source of the field names: the Llama configuration of Hugging Face transformers, both the current
layout (``rope_parameters``) and the older one (``rope_theta`` beside ``rope_scaling``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.reference_engine.errors import (
    CheckpointFileInvalid,
    CheckpointFileMissing,
    CheckpointNotFound,
    UnsupportedArchitecture,
)

_DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequency-dependent scaling of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by one factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position settings; ``scaling`` is None for the original form."""

    theta: float = _DEFAULT_ROPE_THETA
    scaling: Llama3Scaling | LinearScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama decoder's shape. Sizes are counts of elements; ids are token ids."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file; :class:`CheckpointFileMissing` or ``…Invalid`` otherwise."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointFileMissing(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointFileInvalid(path, str(error)) from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointFileInvalid(path, f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointFileInvalid(path, "not a JSON object")
    return value


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in ``directory``.

    End-of-sequence ids come from ``generation_config.json`` where that file names some, because
    instruction-tuned checkpoints list there the turn-end ids that ``config.json`` leaves out.
    """
    if not directory.is_dir():
        raise CheckpointNotFound(directory)
    path = directory / "config.json"
    raw = read_json(path)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    try:
        return parse_config(raw, generation)
    except (KeyError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise CheckpointFileInvalid(path, cause) from error


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Check and convert; raises :class:`UnsupportedArchitecture`, or KeyError/TypeError/ValueError
    for fields that are missing or of the wrong kind."""
    _refuse_what_would_be_computed_wrongly(raw)
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads can not share {kv_heads} key-value heads")
    head_dim = raw.get("head_dim") or hidden // heads
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd, rotary positions need pairs")
    max_positions = int(raw.get("max_position_embeddings", 2048))
    eos = generation.get("eos_token_id")
    return ModelConfig(
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(raw, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        eos_token_ids=_token_ids(raw.get("eos_token_id") if eos is None else eos),
    )


def _refuse_what_would_be_computed_wrongly(raw: Mapping[str, Any]) -> None:
    architectures = raw.get("architectures")
    if architectures is not None and "LlamaForCausalLM" not in architectures:
        raise UnsupportedArchitecture("architecture", architectures)
    if raw.get("model_type", "llama") != "llama":
        raise UnsupportedArchitecture("model_type", raw["model_type"])
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture("hidden_act", raw["hidden_act"])
    if raw.get("quantization_config") is not None:
        raise UnsupportedArchitecture("quantization_config", raw["quantization_config"])


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} should be a positive integer, found {value!r}")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)


def _parse_rope(raw: Mapping[str, Any], max_positions: int) -> Rope:
    """The older key wins where both are present, as in transformers itself."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    theta = _DEFAULT_ROPE_THETA if theta is None else float(theta)
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedArchitecture("partial_rotary_factor", parameters["partial_rotary_factor"])
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling=LinearScaling(factor=float(parameters["factor"])))
    if kind == "llama3":
        original = parameters.get("original_max_position_embeddings", max_positions)
        scaling = Llama3Scaling(
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position_embeddings=int(original),
        )
        return Rope(theta=theta, scaling=scaling)
    raise UnsupportedArchitecture("rope_type", kind)
