"""LoRA adapters, loaded and unloaded on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from app.domain.commands import LoadLora, UnloadLora
from app.domain.facts import LoraFact
from app.domain.operation import JsonObject, OperationWarning
from app.enginekit.errands import Ending, Errand
from app.enginekit.records import REVISION, Counters


async def load_lora(errand: Errand) -> Ending:
    """Loaded already from the same place: nothing changes, and the ranks are not asked."""
    command = cast("LoadLora", errand.command)
    known = errand.state.lora(command.name)
    if known is not None:
        return Ending(result=_result(known, changed=False))
    concluded = await errand.over_ranks()
    loaded = concluded.lora or LoraFact(command.name, command.id, command.path)
    return Ending(
        result=_result(loaded, changed=True),
        change=REVISION,
        settle=lambda _, seen: errand.state.lora_came(loaded, concluded.evicted, seen),
        shows=lambda seen: any(lora.name == loaded.name for lora in seen.loras),
        warnings=tuple(
            OperationWarning("LORA_EVICTED", f"the adapter {gone.name} had to make room")
            for gone in concluded.evicted
        ),
    )


async def unload_lora(errand: Errand) -> Ending:
    command = cast("UnloadLora", errand.command)
    known = errand.state.lora(command.name) or LoraFact(command.name, 0)
    await errand.over_ranks()
    return Ending(
        result=_result(known, changed=True),
        change=REVISION,
        settle=lambda _, seen: errand.state.lora_went(command.name, seen),
        shows=lambda seen: all(lora.name != command.name for lora in seen.loras),
    )


def _result(lora: LoraFact, *, changed: bool) -> Callable[[Counters], JsonObject]:
    adapter: JsonObject = {"id": lora.id, "name": lora.name, "path": lora.path}
    return lambda _: {"changed": changed, "lora": dict(adapter)}
