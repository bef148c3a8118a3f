"""Numbers and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report. `aim` empty: it is only watched; `met` says whether it was reached.
    `how`: the measurement, said once for all lines that share it. `why`: what is known to stand in
    the way, shown where the aim was missed."""

    what: str
    value: str
    baseline: str = ""
    ratio: str = ""
    aim: str = ""
    met: bool = True
    how: str = ""
    why: str = ""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: a value that was measured, never one in between."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def megabytes(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def per_second(count: int, seconds: float) -> str:
    return f"{count / seconds:.0f}/s"
