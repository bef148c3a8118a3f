"""For which engines the endpoint layer is switched on, and how it speaks there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.domain.selectors import Labels, Selector


class Flavour(StrEnum):
    """Which release of vLLM the shapes are of. They differ in what a refused request looks like."""

    V0_26 = "0.26"
    V0_32 = "0.32"


@dataclass(frozen=True, slots=True)
class Exposure:
    selector: Selector
    flavour: Flavour = Flavour.V0_26


@dataclass(frozen=True, slots=True)
class Exposures:
    """The first that takes an engine counts. None at all: the layer is off, without a route."""

    entries: tuple[Exposure, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entries)

    def may_take(self, engine_id: str) -> bool:
        """Whether it is worth asking for the labels of an engine of that id."""
        return any(
            one.selector.ids is None or engine_id in one.selector.ids for one in self.entries
        )

    def flavour_of(self, engine_id: str, labels: Labels) -> Flavour | None:
        """None: the layer is off for this engine."""
        for one in self.entries:
            if one.selector.takes(engine_id, labels):
                return one.flavour
        return None
