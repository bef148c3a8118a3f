"""When each engine of a fleet is to be read again, so that they come one after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from app.ledger.values import Watched

BUSY_S = 1.5
"""Between readings of an engine that is at an order."""
_MOST_A_SECOND = 100
_LONGEST_S = 12.0


def interval_of(wanted_s: float, count: int) -> float:
    """A large fleet is read at a bounded pace, but no engine seldomer than every 12 s for that."""
    return max(wanted_s, min(count / _MOST_A_SECOND, _LONGEST_S))


@dataclass(slots=True)
class Rounds:
    """`wanted_s`: between two readings of an engine. Times are seconds of one steady clock."""

    wanted_s: float
    _due: dict[str, float] = field(default_factory=dict)

    @property
    def look_s(self) -> float:
        """Between two looks at what is registered."""
        return min(self.wanted_s, BUSY_S)

    def due(
        self, fleet: Sequence[Watched], now: float, known: Collection[str] = ()
    ) -> list[tuple[Watched, bool]]:
        """Those to be read before the next look, and whether it is their time or only that they
        are at an order. What is new is read at once, unless it is among the `known`, and then in
        a rhythm that its id gives: not in step with whatever else was new."""
        interval_s = interval_of(self.wanted_s, len(fleet))
        before, self._due = self._due, {}
        chosen: list[tuple[Watched, bool]] = []
        for each in fleet:
            name = each.engine_id
            at = before.get(name)
            if at is None:
                at = now + self.look_s + interval_s * (crc32(name.encode()) / 2**32)
                if name not in known:
                    chosen.append((each, True))
            elif at < now + self.look_s:
                # Once for each, also where this comes late.
                at = max(at + interval_s, now + self.look_s)
                chosen.append((each, True))
            elif each.busy:
                chosen.append((each, False))
            self._due[name] = at
        return chosen
