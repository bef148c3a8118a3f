"""For which engines the endpoint layer is switched on, and how it speaks there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.domain.selectors import Labels, Selector


class Layer(StrEnum):
    """Whose administrative HTTP is spoken; also the word for it in paths."""

    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def product(self) -> str:
        return _TITLES[self]


_TITLES = {Layer.VLLM: "vLLM", Layer.SGLANG: "SGLang"}


class Flavour(StrEnum):
    """Which release of vLLM the shapes are of. They differ in what a refused request looks like.
    SGLang has one."""

    V0_26 = "0.26"
    V0_32 = "0.32"


@dataclass(frozen=True, slots=True)
class Exposure:
    selector: Selector
    flavour: Flavour = Flavour.V0_26
    layer: Layer = Layer.VLLM


@dataclass(frozen=True, slots=True)
class Exposures:
    """Of each layer the first that takes an engine counts. None at all: there is not a route."""

    entries: tuple[Exposure, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entries)

    def may_take(self, layer: Layer, engine_id: str) -> bool:
        """Whether it is worth asking for the labels of an engine of that id."""
        ids = (one.selector.ids for one in self.entries if one.layer is layer)
        return any(some is None or engine_id in some for some in ids)

    def flavour_of(self, layer: Layer, engine_id: str, labels: Labels) -> Flavour | None:
        """None: the layer is off for this engine."""
        for one in self.entries:
            if one.layer is layer and one.selector.takes(engine_id, labels):
                return one.flavour
        return None
