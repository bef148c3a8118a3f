"""Any rank but the first: carries out the order log as it comes, and computes along.

It has no scheduler. Orders about requests concern the first rank; to acknowledge one says that
every step before it in the log is computed here, and none after it.
"""

from __future__ import annotations

from app.reference_engine import messages as m
from app.reference_engine.holding import Holding


class Follower:
    def __init__(self, holding: Holding) -> None:
        self._holding = holding

    def apply(self, order: m.Order) -> m.Result:
        """Raises OrderRefused or PeerLost."""
        if isinstance(order, m.Probe):
            self._holding.probe()
        return m.Done()

    def compute(self, plan: m.StepPlan) -> None:
        """Raises PeerLost."""
        self._holding.compute(plan)
