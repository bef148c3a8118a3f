"""LoRA adapters as they may be ordered."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from app.domain.command import fault
from app.domain.commands import Command, LoadLora, UnloadLora
from app.http.bodies import BIGGEST, OrderBody

ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f]*$"

AdapterName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=ONE_LINE)]


class LoadLoraBody(OrderBody):
    """An adapter belongs to the engine as a whole: `model` is refused."""

    name: AdapterName
    path: Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=ONE_LINE)] = (
        Field(description="As the engine's host sees it.")
    )
    id: Annotated[int, Field(ge=1, le=BIGGEST)] | None = Field(
        None, description="Absent: the engine chooses."
    )

    def command(self) -> Command:
        _refuse_model(self)
        return LoadLora(name=self.name, path=self.path, id=self.id or 0)


class UnloadLoraBody(OrderBody):
    """What any order may say. All of it can be left out."""

    def unload(self, name: str) -> Command:
        _refuse_model(self)
        return UnloadLora(name=name)


def _refuse_model(body: OrderBody) -> None:
    # The engine is not told which model, so an order that names one would become another.
    if body.model is not None:
        raise fault("/model", "adapters belong to the engine as a whole")
