"""How often and how long the runner tries things. Nothing here decides an outcome."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds.

    `sweep_s`: between looks for open operations that nobody drives. `after_end_s`: for reading
    the engine once more before an end is told, so that who hears of the end also sees its effect.
    `transit_s`: what was sent has arrived by then, or never will.
    `retry_first_s`, `retry_most_s`: the pause between attempts, doubled from one to the other.
    """

    lease_ttl_s: float = 15.0
    sweep_s: float = 1.0
    find_timeout_s: float = 3.0
    cancel_timeout_s: float = 5.0
    stage_timeout_s: float = 30.0
    after_end_s: float = 1.0
    transit_s: float = 5.0
    retry_first_s: float = 0.1
    retry_most_s: float = 10.0
