"""Tensors as SGLang's own trainers hand them over: pickles of handles to shared memory."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import load_file
from torch import Tensor

from tests.reference_engine.trainers import Trainer, trainer


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


def specs(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        for name, tensor in tensors.items()
    ]


@contextmanager
def sending(*steps: dict[str, Tensor]) -> Iterator[Trainer]:
    """A trainer that broadcasts all tensors of all steps, as fast as the engine takes them."""

    def act(member: Trainer) -> None:
        for step in steps:
            member.send(*step.values())
        member.stay()

    with trainer(1, act) as sender:
        yield sender
