"""What holds for an adapter of any engine before it is loaded. Each raises RuntimeFault."""

from __future__ import annotations

from collections.abc import Collection

from app.domain.commands import LoadLora
from app.enginekit.runtime import RuntimeFault


def may_be_named(command: LoadLora, models: Collection[str]) -> None:
    """The engine gives the numbers, and a request names an adapter where it names a model."""
    if command.id:
        raise RuntimeFault(
            "LORA_ID_NOT_OFFERED", "the engine numbers its adapters", code="INVALID_ARGUMENT"
        )
    if command.name in models:
        raise RuntimeFault("LORA_NAME_TAKEN", "a base model has this name", code="ALREADY_EXISTS")


def has_room(slots: int | None, loaded: Collection[str], name: str) -> None:
    """`slots` None: the engine does not tell how many there are."""
    if slots is not None and len(set(loaded) - {name}) >= slots:
        raise RuntimeFault(
            "LORA_SLOTS_FULL",
            f"the engine has room for {slots} adapters: unload one",
            code="RESOURCE_EXHAUSTED",
        )
