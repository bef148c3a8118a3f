"""Numbers and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report. `aim` empty: it is only watched."""

    what: str
    value: str
    baseline: str = ""
    ratio: str = ""
    aim: str = ""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: a value that was measured, never one in between."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def per_second(count: int, seconds: float) -> str:
    return f"{count / seconds:.0f}/s"
