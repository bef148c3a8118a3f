"""Small checkpoints, written without an array library."""

from __future__ import annotations

import struct
from pathlib import Path

from app.conformance.tensors import Tensor, written

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")


def weights(seed: int) -> tuple[Tensor, ...]:
    content = struct.pack("<4f", seed, seed + 0.25, seed + 0.5, seed + 0.75)
    return tuple(Tensor(name, "F32", (2, 2), content) for name in NAMES)


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(written(weights(seed)))
    return folder


def adapter(folder: Path, seed: int = 7) -> Path:
    """As far as anybody looks at it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(written(weights(seed)))
    return folder
