"""The exposition format of Prometheus, as far as it is used here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Samples:
    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float | None:
        """Over all engines. None: the server does not tell it."""
        found = [
            one.value
            for one in self.samples
            if one.name == name and all(one.labels.get(k) == v for k, v in labels.items())
        ]
        return sum(found) if found else None

    def by_number(self, name: str, label: str) -> dict[int, float]:
        """By a label that holds a number, such as that of a data-parallel engine."""
        return {
            int(one.labels[label]): one.value
            for one in self.samples
            if one.name == name and one.labels.get(label, "").isdecimal()
        }

    @property
    def started_at(self) -> float | None:
        """Of the server's process, in Unix seconds. Another one means another process."""
        return self.total("process_start_time_seconds")


def samples_of(body: bytes) -> tuple[Sample, ...]:
    """Lines of another form are passed over, and values that are no numbers: NaN would be another
    process each time."""
    found = []
    for line in body.decode("utf-8", "replace").splitlines():
        matched = None if line.startswith("#") else _SAMPLE.match(line)
        if matched is None:
            continue
        name, labels, value = matched.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            found.append(Sample(name, dict(_LABEL.findall(labels or "")), number))
    return tuple(found)
