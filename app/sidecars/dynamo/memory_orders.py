"""Release and restore of a worker's memory, by putting it to sleep."""

from __future__ import annotations

from dataclasses import replace

from app.domain.kinds import WeightsState
from app.domain.operation import OperationWarning
from app.enginekit.runtime import Conclusion, RuntimeFault
from app.sidecars.dynamo.carried import WorkerOrder
from app.sidecars.dynamo.worker import DynamoWorker
from app.sidecars.faults import refused, remaining_s

OPENED_BRIEFLY = OperationWarning(
    "ADMISSION_OPENED_BRIEFLY",
    "the worker opens itself when it wakes: it was paused again at once, and what it had begun"
    " meanwhile is frozen",
)
OPENED = OperationWarning(
    "ADMISSION_OPENED", "the worker takes requests again by itself when it wakes: it knows no pause"
)
KV_GOES_ALONG = OperationWarning(
    "KV_CACHE_RELEASED_TOO",
    "the worker gives its KV memory back together with its weights, and takes it again with them;"
    " what it had cached is dropped",
)
UNROUTED = OperationWarning(
    "WORKER_UNROUTED", "the worker has left Dynamo's discovery, and comes back when it wakes"
)
LONGEST_DRAIN_S = 3_600.0
_ALREADY = "already"
# Of the time that the kit gives a rollback.
_UNDO_S = 20.0


class CarriedRelease(WorkerOrder):
    """Nothing runs, since the kit has paused; and nothing may be frozen, since a worker ends all
    requests before it sleeps. One without a pause closes and drains by itself."""

    async def prepare(self) -> None:
        self.worker.may_move()
        if self.worker.found.routes.pause is None:
            return
        if self.worker.belief.paused is None:
            raise refused("NOT_PAUSED", "the engine is not paused")
        if (await self.worker.metrics()).in_flight:
            raise refused("REQUESTS_FROZEN", "requests are frozen, and would be ended")

    async def commit(self) -> None:
        worker, belief, routes = self.worker, self.worker.belief, self.worker.found.routes
        assert routes.sleep is not None  # nothing else is offered
        body = dict(routes.sleep_options)
        # Before it is asked for: an answer that is lost must not leave it looking awake.
        worker.believe(replace(belief, asleep=True))
        try:
            async with self.sending():
                left_s = remaining_s(self.order.deadline_at)
                if routes.limit is not None:  # that it gives up before it is given up on
                    body[routes.limit] = min(left_s, LONGEST_DRAIN_S) * 0.9
                longest_s = worker.longest_s(self.order.deadline_at)
                said = await worker.through(worker.order(routes.sleep, body, within_s=longest_s))
        except RuntimeFault:
            if not self.sent:
                worker.believe(belief)
            raise
        if _ALREADY in str(said.get("message", "")):
            # How deep, it does not say where there are depths: its weights may be gone.
            deep = bool(routes.sleep_options)
            weights = WeightsState.INCONSISTENT if deep else belief.weights
            worker.believe(replace(belief, asleep=True, weights=weights))
            self.sent = False
            raise RuntimeFault("ASLEEP_ALREADY", "somebody else has put the worker to sleep")

    async def undo(self) -> None:
        """Once it sleeps: woken before that it says that it is awake, and falls asleep then."""
        await self.worker.ended(_UNDO_S)
        await self.worker.through(wake(self.worker, self.order.deadline_at))

    async def conclude(self) -> Conclusion:
        return Conclusion(warnings=(KV_GOES_ALONG, UNROUTED))


class CarriedRestore(WorkerOrder):
    """Wholly, always: one that is woken in part counts itself as awake, and takes back the rest of
    its memory never."""

    async def prepare(self) -> None:
        self.worker.may_move()

    async def commit(self) -> None:
        async with self.sending():
            await self.worker.through(wake(self.worker, self.order.deadline_at))

    async def undo(self) -> None:
        await self.worker.ended(_UNDO_S)
        raise RuntimeFault("NOT_UNDONE", "what was restored cannot be given back for sure")

    async def conclude(self) -> Conclusion:
        pauses = self.worker.found.routes.pause is not None
        return Conclusion(warnings=(OPENED_BRIEFLY if pauses else OPENED,))


async def wake(worker: DynamoWorker, deadline_at: float) -> None:
    """Raises RuntimeFault."""
    route = worker.found.routes.wake
    assert route is not None
    try:
        await worker.order(route, {}, within_s=worker.longest_s(deadline_at))
    finally:
        # Without an answer, or with a refusal, it may be open all the same.
        if worker.found.routes.pause is not None:
            await worker.freeze()
    worker.believe(replace(worker.belief, asleep=False))
