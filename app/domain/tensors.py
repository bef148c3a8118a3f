"""Tensors as orders describe them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from app.domain.command import fault
from app.domain.kinds import TensorDtype
from app.domain.operation import JsonObject, JsonValue


def check_unique(names: Iterable[str], pointer: str) -> None:
    seen = list(names)
    if not seen:
        raise fault(pointer, "must not be empty")
    if "" in seen or len(set(seen)) != len(seen):
        raise fault(pointer, "each has a name, and one of its own")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """`shape` () is a scalar. Names are those of the checkpoint's tensors."""

    name: str
    dtype: TensorDtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Contiguous, without padding."""
        return math.prod(self.shape) * self.dtype.size_bytes

    def document(self) -> dict[str, JsonValue]:
        return {"name": self.name, "dtype": self.dtype.value, "shape": list(self.shape)}

    @classmethod
    def of(cls, document: JsonObject) -> TensorSpec:
        return cls(
            name=cast("str", document["name"]),
            dtype=TensorDtype(cast("str", document["dtype"])),
            shape=tuple(cast("list[int]", document["shape"])),
        )
