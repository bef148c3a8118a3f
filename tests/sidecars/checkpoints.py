"""Small checkpoints, written without an array library."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from app.conformance.tensors import Tensor, written

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")


def weights(seed: int) -> tuple[Tensor, ...]:
    content = struct.pack("<4f", seed, seed + 0.25, seed + 0.5, seed + 0.75)
    return tuple(Tensor(name, "F32", (2, 2), content) for name in NAMES)


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(written(weights(seed)))
    return folder


def adapter(
    folder: Path, seed: int = 7, *, config: dict[str, Any] | None = None, **halves: tuple[int, int]
) -> Path:
    """Of one part of the model. `A`, `B`: shapes other than what fits; `config`: fields of its."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**known, **(config or {})}))
    stem = f"base_model.model.{NAMES[1].removesuffix('.weight')}"
    tensors = [
        Tensor(
            f"{stem}.lora_{half}.weight", "F32", shape, struct.pack("<f", seed) * math.prod(shape)
        )
        for half, shape in {"A": (8, 2), "B": (2, 8), **halves}.items()
    ]
    (folder / "adapter_model.safetensors").write_bytes(written(tensors))
    return folder
