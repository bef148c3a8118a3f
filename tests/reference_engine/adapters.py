"""Adapters for the tests, and the models that they stand for: merged into the weights."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.reference_engine.adapter_orders import LoadedAdapter, PrepareLoad
from app.reference_engine.adapter_reading import read_adapter
from app.reference_engine.adapter_sources import AdapterPolicy
from app.reference_engine.config import read_config
from app.reference_engine.lora import Adapter
from app.reference_engine.sharding import Layout

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PATIENCE_S = 60.0


def products(adapter: Path) -> dict[str, Tensor]:
    """What each weight grows by, by its name; computed from the files alone."""
    raw = json.loads((adapter / CONFIG).read_text())
    rank, alpha = raw["r"], raw["lora_alpha"]
    scale = alpha / rank**0.5 if raw["use_rslora"] else alpha / rank
    tensors = {name: one.to(torch.float64) for name, one in load_file(adapter / TENSORS).items()}
    found = {}
    for name, up in tensors.items():
        if name.endswith("lora_B.weight"):
            down = tensors[name.replace("lora_B", "lora_A")]
            module = name.removeprefix(_PREFIX).removesuffix(".lora_B.weight")
            found[f"{module}.weight"] = scale * up @ down
    return found


def merged_model(model: Any, adapter: Path) -> Any:
    """transformers' model with the adapter in its weights."""
    merged = copy.deepcopy(model)
    parameters = dict(merged.named_parameters())
    with torch.no_grad():
        for name, growth in products(adapter).items():
            parameters[name] += growth.to(torch.float32)
    return merged


def merged_checkpoint(checkpoint: Path, adapter: Path, target: Path) -> Path:
    """A checkpoint with the adapter in its weights."""
    shutil.copytree(checkpoint, target)
    file = target / "model.safetensors"
    weights = {name: one.to(torch.float32) for name, one in load_file(file).items()}
    for name, growth in products(adapter).items():
        weights[name] = weights[name] + growth.to(torch.float32)
    save_file(weights, file, {"format": "pt"})
    return target


def loading(
    checkpoint: Path, adapter: Path, name: str = "tone", number: int = 1, **order: Any
) -> PrepareLoad:
    """The order to load an adapter, as the front end would give it."""
    policy = AdapterPolicy(roots=(adapter.parent,))
    source = policy.find(str(adapter), read_config(checkpoint))
    loaded = LoadedAdapter(name=name, number=number, path=str(adapter), source=source)
    return PrepareLoad(adapter=loaded, **{"change_id": f"load-{name}", **order})


def part_of(order: PrepareLoad, layout: Layout) -> Adapter:
    """One rank's part of it."""
    adapter, _ = read_adapter(order, layout, torch.device("cpu"), lambda: None)
    return adapter


class Threads:
    """The ranks of a group as threads of this process. ``member`` is one rank's Collective."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def exchanged(self, rank: int, mine: Tensor) -> list[Tensor]:
        self._given[rank] = mine
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """What each rank's work returns."""
        results: dict[int, Tensor] = {}

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        threads = [
            threading.Thread(target=one, args=(rank,)) for rank in range(self._barrier.parties)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(len(threads))]


class Member:
    def __init__(self, group: Threads, rank: int) -> None:
        self._group = group
        self._rank = rank
        self.alone = False

    def sum(self, partial: Tensor) -> Tensor:
        total = torch.zeros_like(partial)
        for part in self._group.exchanged(self._rank, partial):
            total += part
        return total

    def join(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        parts = self._group.exchanged(self._rank, columns)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, dim=1) if self._rank == 0 else columns
