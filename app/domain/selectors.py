"""Which engines something is about, by their ids and labels. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"[\x20-\x7e]{0,63}")

Labels = Mapping[str, str]


def is_engine_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def is_label_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    return _VALUE.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Engines that meet all of it.

    `ids` None: whatever its id. `labels`: it has each of these, with one of the values. `without`:
    it has none of these with one of the values; one without such a label meets that.
    """

    ids: frozenset[str] | None = None
    labels: Mapping[str, frozenset[str]] = field(default_factory=dict)
    without: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def takes_all(self) -> bool:
        return self.ids is None and not self.labels and not self.without

    def takes(self, engine_id: str, labels: Labels) -> bool:
        return (
            (self.ids is None or engine_id in self.ids)
            and all(labels.get(name) in values for name, values in self.labels.items())
            and not any(labels.get(name) in values for name, values in self.without.items())
        )

    def within(self, other: Selector) -> Selector:
        """Engines that both take."""
        if self.ids is None or other.ids is None:
            ids = other.ids if self.ids is None else self.ids
        else:
            ids = self.ids & other.ids
        labels = {**self.labels, **other.labels}
        without = {**self.without, **other.without}
        return Selector(
            ids=ids,
            labels={
                name: self.labels.get(name, values) & other.labels.get(name, values)
                for name, values in labels.items()
            },
            without={
                name: self.without.get(name, values) | other.without.get(name, values)
                for name, values in without.items()
            },
        )

    def in_words(self) -> str:
        """For people."""
        parts = [] if self.ids is None else [f"id {_either(self.ids)}"]
        parts += [f"{name} = {_either(values)}" for name, values in sorted(self.labels.items())]
        parts += [
            f"not {name} = {_either(values)}" for name, values in sorted(self.without.items())
        ]
        return " and ".join(parts) or "all engines"


@dataclass(frozen=True, slots=True)
class Sight:
    """Engines that one of the selectors takes. None: all that there are, were, or may be."""

    selectors: tuple[Selector, ...] | None

    @classmethod
    def of(cls, selectors: Iterable[Selector]) -> Sight:
        found = tuple(selectors)
        return EVERYTHING if any(one.takes_all for one in found) else cls(found)

    @property
    def unlimited(self) -> bool:
        return self.selectors is None

    def sees(self, engine_id: str, labels: Labels) -> bool:
        if self.selectors is None:
            return True
        return any(one.takes(engine_id, labels) for one in self.selectors)


EVERYTHING = Sight(None)


def _either(values: Iterable[str]) -> str:
    return " or ".join(repr(value) for value in sorted(values))
