"""What a rank holds when an adapter has come or gone, and while its weights are released."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from app.reference_engine.adapter_orders import (
    AdapterPreparation,
    PrepareLoad,
    PrepareUnload,
)
from app.reference_engine.adapter_reading import read_adapter
from app.reference_engine.change_orders import ChangePrepared
from app.reference_engine.errors import OrderRefused
from app.reference_engine.holding import Held, Holding
from app.reference_engine.host_memory import bytes_of, sha256_of
from app.reference_engine.lora import Adapter, unpacked


def check_adapters(order: AdapterPreparation, held: Held) -> None:
    """Raises OrderRefused."""
    if isinstance(order, PrepareUnload):
        if order.name not in held.adapters:
            raise OrderRefused("no adapter of that name is loaded")
        return
    if held.model is None:
        raise OrderRefused("weights are not there: restore or update them first")
    left = [one.loaded for name, one in held.adapters.items() if name not in order.evict]
    if any(one.name == order.adapter.name for one in left):
        raise OrderRefused("an adapter of that name is loaded")
    if any(one.number == order.adapter.number for one in left):
        raise OrderRefused("an adapter of that number is loaded")


def with_adapters(
    order: AdapterPreparation, holding: Holding, proceed: Callable[[], None]
) -> tuple[Held, ChangePrepared]:
    """Raises CheckpointError or AdapterRefused."""
    before = holding.held
    if isinstance(order, PrepareUnload):
        left = {name: one for name, one in before.adapters.items() if name != order.name}
        return replace(before, adapters=left), ChangePrepared()
    return _loaded(order, holding, proceed)


def _loaded(
    order: PrepareLoad, holding: Holding, proceed: Callable[[], None]
) -> tuple[Held, ChangePrepared]:
    before = holding.held
    adapter, read = read_adapter(order, holding.bare.layout, holding.device, proceed)
    left = {name: one for name, one in before.adapters.items() if name not in order.evict}
    after = replace(before, adapters={**left, order.adapter.name: adapter})
    tensors = adapter.tensors
    return after, ChangePrepared(
        tensors=len(tensors), bytes=bytes_of(tensors), sha256=adapter.sha256, read=read
    )


def without_tensors(held: Held) -> dict[str, Adapter]:
    """While a copy of them is kept elsewhere."""
    return {name: adapter.without_tensors() for name, adapter in held.adapters.items()}


def with_tensors(
    held: Held, kept: Mapping[str, Tensor], proceed: Callable[[], None]
) -> dict[str, Adapter]:
    """Raises OrderRefused where the copy is not what was put there."""
    found = {}
    for name, adapter in held.adapters.items():
        found[name] = unpacked(adapter, kept)
        if sha256_of(found[name].tensors, proceed) != adapter.sha256:
            raise OrderRefused("the copy of an adapter is damaged")
    return found
