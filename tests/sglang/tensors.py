"""Tensors as SGLang's own trainers hand them over: pickles of handles to shared memory."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import load_file
from torch import Tensor


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors")


def serialized(tensors: Iterable[tuple[str, Tensor]] | Any) -> str:
    """Base64. What it names is gone once the engine has read it: a second reading fails."""
    sharing: Any = torch.multiprocessing
    before = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")
    try:
        written = io.BytesIO()
        ForkingPickler(written).dump(tensors)
    finally:
        sharing.set_sharing_strategy(before)
    return base64.b64encode(written.getvalue()).decode()
