"""Tensors of a checkpoint, read and checked; see ``demanded`` for which ones there must be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from app.reference_engine.config import ModelConfig
from app.reference_engine.demanded import Demanded, expected_shapes
from app.reference_engine.errors import TensorMismatch, TensorRepeated
from app.reference_engine.sharding import EMBEDDING, FINAL_NORM, LM_HEAD, Layout
from app.reference_engine.tensor_files import Entry, TensorFile
from app.reference_engine.weight_files import safetensors_files

__all__ = ["EMBEDDING", "FINAL_NORM", "LM_HEAD", "expected_shapes", "load_part", "load_weights"]


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
    ``proceed`` is called before each and may raise to stop the gathering; ``taken`` is told of each
    afterwards.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        check_finite: bool = False,
        proceed: Callable[[], None] = lambda: None,
        taken: Callable[[str, Tensor], None] = lambda _name, _part: None,
    ) -> None:
        self._layout = layout
        self._demanded = Demanded(layout.config)
        self._check_finite = check_finite
        self._proceed = proceed
        self._taken = taken
        self._weights: dict[str, Tensor] = {}

    def take_file(self, file: TensorFile) -> None:
        """Every tensor that the file's own header names."""
        for name, entry in file.entries().items():
            self.take(file, name, entry)

    def take(self, file: TensorFile, name: str, entry: Entry) -> None:
        """Read this rank's part of one tensor. Raises CheckpointError naming it."""
        self._proceed()
        if not self._demanded.takes(name, entry.dtype, entry.shape):
            return
        if name in self._weights:
            raise TensorRepeated(name)
        part = file.tensor(entry, self._layout.cut(name)).to(torch.float32)
        # Each rank looks at its own part: together they have looked at every element.
        if self._check_finite and not bool(torch.isfinite(part).all()):
            raise TensorMismatch(name, "finite", "a value that is not a finite number")
        self._weights[name] = part
        self._taken(name, part)

    def __len__(self) -> int:
        return len(self._weights)

    def complete(self) -> dict[str, Tensor]:
        """In the order of the configuration. Raises TensorMissing."""
        return {name: self._weights[name] for name in self._demanded.complete(self._weights)}
