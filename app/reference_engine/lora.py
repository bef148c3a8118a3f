"""Low-rank adapters beside the weights of one rank, and the rows of a step that they change.

A changed projection computes ``W x + scale B A x``. Where the ranks divide a projection's outputs
among themselves, each has its rows of B and all of A; where they divide its inputs, its columns of
A and all of B: what an adapter adds is then summed over the ranks together with the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F  # noqa: N812 (the name everybody knows it by)
from torch import Tensor

from app.reference_engine.adapter_orders import LoadedAdapter

_PACKED = "adapter "


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """``down`` is A, [rank, inputs]; ``up`` is scale times B, [outputs, rank]. Both are filled up
    with zeros to a rank for which matrix kernels have no remainder."""

    down: Tensor
    up: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(F.linear(rows, self.down), self.up)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Adapter:
    """One rank's part of an adapter. ``key`` is of this very loading: what was computed under an
    earlier one of the same name is never taken for its own. ``changes`` by the projection's full
    name; empty while the weights are released."""

    loaded: LoadedAdapter
    key: str
    sha256: str
    changes: Mapping[str, LowRank]

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {}
        for name, change in self.changes.items():
            named[f"{name}.down"], named[f"{name}.up"] = change.down, change.up
        return named

    def without_tensors(self) -> Adapter:
        return replace(self, changes={})


class StepAdapters:
    """The rows of one step that adapters change, each with its adapter."""

    def __init__(self, parts: Sequence[tuple[Tensor, int, Adapter]] = ()) -> None:
        """A part is an index of rows, padded at its end, how many of them count, and the adapter.
        No row is in two parts."""
        self._parts = parts

    def add(self, module: str, rows: Tensor, result: Tensor) -> Tensor:
        """``result`` of a projection plus what the adapters make of its ``rows``, in place. Rows
        without an adapter stay as they are, bit for bit."""
        for index, count, adapter in self._parts:
            change = adapter.changes.get(module)
            if change is not None:
                result.index_add_(0, index[:count], change(rows[index])[:count])
        return result


NO_ADAPTERS = StepAdapters()


def packed(adapters: Iterable[Adapter]) -> dict[str, Tensor]:
    """All tensors of all adapters, under names that no weight has."""
    return {
        f"{_PACKED}{adapter.key} {name}": tensor
        for adapter in adapters
        for name, tensor in adapter.tensors.items()
    }


def unpacked(adapter: Adapter, tensors: Mapping[str, Tensor]) -> Adapter:
    """An adapter with its tensors again, from among the packed ones."""
    changes = {
        module: LowRank(
            tensors[f"{_PACKED}{adapter.key} {module}.down"],
            tensors[f"{_PACKED}{adapter.key} {module}.up"],
        )
        for module in adapter.loaded.source.modules
    }
    return replace(adapter, changes=changes)


def is_packed(name: str) -> bool:
    return name.startswith(_PACKED)
