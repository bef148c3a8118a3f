"""A LoRA adapter in a folder, looked at before an engine is sent to it.

Some engines load what does not fit without a word, and end with the first request that names it. So
the ranks and sizes of its tensors are compared with its own configuration and with the model.

Source of the form: what PEFT writes, `adapter_config.json` with `r` and `target_modules`, and
`adapter_model.safetensors` with two tensors for each part of the model: A (r x in), B (out x r).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.sidecars.safetensors import INDEX, BadWeights, TensorAt, files_at

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_LONGEST_CONFIG = 1 << 20
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(?:(embedding)_)?([AB])(?:\.weight)?")
_DTYPES = ("F32", "F16", "BF16")
# Engines put some parts of a layer together, and look for the others by the first one's name.
_TOGETHER = {
    "q_proj": ("v_proj",),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
    "kv_a_proj_with_mqa": ("q_a_proj",),
}


def adapter_fits(folder: Path, model: Path) -> None:
    """Blocks on the disk. Raises BadWeights."""
    if [one.name for one in folder.glob("*.safetensors")] != [WEIGHTS] or (folder / INDEX).exists():
        raise BadWeights(f"an adapter is {CONFIG} and {WEIGHTS}, and no other weights")
    rank, targets = _config(folder / CONFIG)
    (file,) = files_at(folder / WEIGHTS)
    parts = {name: one for of in files_at(model) for name, one in of.tensors.items()}
    halves: dict[str, set[str]] = {}
    for name, tensor in file.tensors.items():
        matched = _NAME.fullmatch(name)
        if matched is None or tensor.dtype not in _DTYPES or len(tensor.shape) != 2:
            raise BadWeights("the adapter has a tensor that is none of an adapter")
        part, marked, half = matched.groups()
        embedding = part.endswith("embed_tokens")
        if marked and not embedding:
            raise BadWeights("the adapter has tensors of an embedding for what is none")
        if part.rpartition(".")[2] not in targets:
            raise BadWeights("the adapter has tensors of parts that are not its targets")
        size, given = tensor.shape if half == "B" else tensor.shape[::-1]
        if given != rank:
            raise BadWeights(f"the adapter has tensors of another rank than {rank}")
        # Rows of an embedding are what goes in, of any other part what comes out.
        _compare(part, size, 0 if (half == "A") is embedding else 1, parts)
        halves.setdefault(part, set()).add(half)
    if not halves or any(len(found) < 2 for found in halves.values()):
        raise BadWeights("the adapter lacks a tensor of a pair")
    for part in halves:
        stem, _, last = part.rpartition(".")
        for other in _TOGETHER.get(last, ()):
            beside = f"{stem}.{other}"
            if f"{beside}.weight" in parts and beside not in halves:
                raise BadWeights(f"the adapter has {last} of a layer without its {other}")


def _compare(part: str, size: int, axis: int, parts: Mapping[str, TensorAt]) -> None:
    """Of quantized parts the shape is not that of their numbers. Raises BadWeights."""
    known = parts.get(f"{part}.weight")
    if known is None:
        if not any(name.startswith(f"{part}.") for name in parts):
            raise BadWeights("the adapter has tensors of a part that the model does not have")
    elif len(known.shape) == 2 and known.shape[axis] != size:
        raise BadWeights("the adapter has tensors of another shape than the model's part")


def _config(path: Path) -> tuple[int, frozenset[str]]:
    """Rank and targets. Raises BadWeights."""
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(_LONGEST_CONFIG).decode())
    except (OSError, ValueError, RecursionError):
        raise BadWeights(f"there is no {CONFIG} that can be read") from None
    config: dict[str, Any] = found if isinstance(found, dict) else {}
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    targets: Any = config.get("target_modules")
    if str(config.get("peft_type")).lower() != "lora" or config.get("use_dora"):
        raise BadWeights("the adapter is of another kind than LoRA")
    if type(rank) is not int or rank < 1:
        raise BadWeights("the adapter's rank is no number above 0")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise BadWeights("the adapter's lora_alpha is no finite number")
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise BadWeights("the adapter does not name its targets one by one")
    return rank, frozenset(targets)
