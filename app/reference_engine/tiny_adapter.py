"""``python -m app.reference_engine.tiny_adapter CHECKPOINT FOLDER [SEED]``: a small random adapter.

For demonstrations and tests: it makes a checkpoint say other things, no better ones. The layout is
that of Hugging Face peft.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from app.reference_engine.adapter_config import PROJECTIONS
from app.reference_engine.config import read_config
from app.reference_engine.demanded import expected_shapes


def write_tiny_adapter(
    checkpoint: Path,
    folder: Path,
    seed: int = 0,
    *,
    rank: int = 4,
    alpha: float = 8,
    use_rslora: bool = False,
    targets: Sequence[str] = PROJECTIONS,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """The folder, with the adapter in it. Raises CheckpointError."""
    model = read_config(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "r": rank,
        "target_modules": list(targets),
        "use_dora": False,
        "use_rslora": use_rslora,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(model).items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not any(module.endswith(f".{target}") for target in targets):
            continue
        outputs, inputs = shape
        down = torch.randn((rank, inputs), generator=generator) * inputs**-0.5
        up = torch.randn((outputs, rank), generator=generator) * rank**-0.5
        if module.endswith(("o_proj", "down_proj")):
            up[0] = 0.0  # the small checkpoint's channel that no layer writes to
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype)
    (folder / "adapter_config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


if __name__ == "__main__":
    write_tiny_adapter(Path(sys.argv[1]), Path(sys.argv[2]), int(([*sys.argv, "0"])[3]))
