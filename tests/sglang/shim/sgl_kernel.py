"""Stands in for SGLang's compiled kernels, in plain torch: what a tiny Llama touches on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from stand_ins import names_of, stand_in

__version__ = "0.4.10"
__path__: list[str] = []


def copy_all_layer_kv_cache_cpu(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    target: torch.Tensor,
    source: torch.Tensor,
) -> None:
    """Move entries of the KV cache, in every layer."""
    for buffer in (*k_buffers, *v_buffers):
        buffer[target.long()] = buffer[source.long()]


def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """A CPU build of torch has no pinned memory: the wish for it is dropped."""

    def made(*arguments: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return make(*arguments, **named)

    return made


if not torch.cuda.is_available():
    for _name in ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like"):
        setattr(torch, _name, unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]

stand_in(__name__)
__getattr__ = names_of(__name__)
