"""Llama checkpoints of any size with random weights, in float32."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from app.reference_engine.config import parse_config
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.reference_engine.weights import expected_shapes


@dataclass(frozen=True, slots=True)
class Size:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


SMALL = Size(512, 1408, 8, 8, 4)  # 24 million parameters
LARGE = Size(1024, 2816, 10, 16, 8)  # 120 million


def checkpoint(folder: Path, size: Size | None, seed: int = 0) -> Path:
    """Below ``folder``; None: the one that an engine makes for itself. The tokenizer is its."""
    own = ensure_tiny_checkpoint(folder / "own", seed)
    if size is None:
        return own
    made = folder / f"{size.hidden}x{size.layers}-{seed}"
    made.mkdir()
    raw = json.loads((own / "config.json").read_text())
    raw |= {
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.hidden // size.heads,
    }
    (made / "config.json").write_text(json.dumps(raw))
    for path in own.glob("*.json"):
        if path.name != "config.json":
            shutil.copy(path, made)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in expected_shapes(parse_config(raw, {})).items()
    }
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made
