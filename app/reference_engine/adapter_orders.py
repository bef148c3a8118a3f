"""Orders about adapters; they go the way of every change of what the ranks hold, see
``change_orders``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """An adapter's tensors: a safetensors file by its real path, links resolved, with the
    ``sha256`` of the whole file in hex; ``rank`` of both matrices of each projection in ``modules``
    (full names), and the ``scale`` of their product."""

    path: str
    sha256: str
    rank: int
    scale: float
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter under its name. ``path`` as it was ordered; ``number`` above 0 and unique."""

    name: str
    number: int
    path: str
    source: AdapterSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareLoad:
    """Put an adapter beside the others; those named by ``evict`` go with its commit."""

    change_id: str
    adapter: LoadedAdapter
    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareUnload:
    change_id: str
    name: str


AdapterPreparation = PrepareLoad | PrepareUnload


def leaving(order: object) -> tuple[str, ...]:
    """Names of the adapters that go with an order's commit."""
    match order:
        case PrepareLoad(evict=evict):
            return evict
        case PrepareUnload(name=name):
            return (name,)
    return ()
