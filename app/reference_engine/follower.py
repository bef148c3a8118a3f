"""Any rank but the first: carries out the order log as it comes, and computes along.

It has no scheduler. Orders about requests concern the first rank; to acknowledge one says that
every step before it in the log is computed here, and none after it.
"""

from __future__ import annotations

from collections.abc import Callable

from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
from app.reference_engine.handoff_messages import CollectKv
from app.reference_engine.holding import Holding
from app.reference_engine.shape_orders import BesideSteps, WriteWeights
from app.reference_engine.staging import Staging
from app.reference_engine.weight_parts import writing


class Follower:
    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._staging = Staging(holding)

    def prepare(self, order: BesideSteps) -> Callable[[], m.Result]:
        """See :meth:`Staging.begin`."""
        if isinstance(order, WriteWeights):
            return writing(self._holding, order)
        return self._staging.begin(order)

    def apply(self, order: m.Order) -> m.Result:
        """Raises OrderRefused."""
        match order:
            case c.CommitChange(change_id):
                return self._staging.commit(change_id)
            case c.UndoChange(change_id):
                return self._staging.undo(change_id)
            case c.SettleChange(change_id):
                return self._staging.settle(change_id)
            case CollectKv(request_id):
                return self._holding.collect(request_id)
            case m.ReadLoad():
                return self._holding.memory()
        return m.Done()

    def compute(self, plan: m.StepPlan) -> None:
        """Raises PeerLost; OrderRefused means that this rank is not what the first one thinks."""
        self._holding.compute(plan)
