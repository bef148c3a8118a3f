"""Pauses between attempts: longer each time up to a limit, and never in step with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`jitter` gives 0.0 to 1.0; a pause is between half and the whole of its length."""

    first_s: float
    most_s: float
    jitter: Callable[[], float]

    def pause_s(self, attempt: int) -> float:
        """Before attempt 0 there is none."""
        if attempt <= 0:
            return 0.0
        # Beyond 2^30 the limit has long been reached; it only keeps the power small.
        length = min(self.most_s, self.first_s * float(1 << min(attempt - 1, 30)))
        return length * (0.5 + self.jitter() / 2)
