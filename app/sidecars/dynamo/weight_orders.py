"""New weights from files, which the engine behind a worker reads into the model that serves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.domain.commands import UpdateWeights
from app.domain.kinds import WeightsState
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.checkpoints import Checkpoint, looked_at
from app.sidecars.dynamo.carried import WorkerOrder
from app.sidecars.dynamo.serving_orders import FLUSHED
from app.sidecars.dynamo.worker import DynamoWorker
from app.sidecars.faults import inconsistent
from app.sidecars.safetensors import BadWeights

# How the worker with vLLM in it refuses before it has touched anything.
_NOT_PAUSED = "Worker must be paused"


class CarriedUpdate(WorkerOrder):
    """From the call on there is no way back: whatever goes wrong leaves weights that no request may
    meet, and only a whole good update makes them right again. So everything that can be looked at
    is looked at before. A worker has no checksums, so that an update is never verified."""

    def __init__(
        self,
        order: Order,
        command: UpdateWeights,
        worker: DynamoWorker,
        source: DiskWeights,
        model_path: Path | None,
    ) -> None:
        super().__init__(order, worker)
        self._command = command
        self._source = source
        self._model_path = model_path
        self._before = worker.belief.weights
        self._unchanged = False
        self._checkpoint: Checkpoint | None = None

    async def prepare(self) -> None:
        self.worker.may_move()
        try:
            self._checkpoint = await asyncio.to_thread(
                looked_at,
                self._source,
                self.worker.allowed,
                model=self._model_path,
                check_finite=self._command.check_finite,
            )
        except BadWeights as error:
            raise RuntimeFault("WEIGHTS_UNFIT", str(error), code="INVALID_ARGUMENT") from error

    async def commit(self) -> None:
        worker, version = self.worker, self._command.weight_version
        assert self._checkpoint is not None
        worker.belief.may_update()
        if await worker.paused() is False:
            raise RuntimeFault(
                "NOT_PAUSED", "somebody else has resumed the engine", code="FAILED_PRECONDITION"
            )
        route = worker.found.routes.from_disk
        assert route is not None  # nothing else is offered
        body: dict[str, Any] = {
            "model_path": str(self._checkpoint.path),
            "weight_version": version,
            **worker.found.routes.update_options,
        }
        worker.believe(replace(worker.belief, weights=WeightsState.INCONSISTENT))
        try:
            async with self.sending():
                longest_s = worker.longest_s(self.order.deadline_at)
                said = await worker.through(worker.order(route, body, within_s=longest_s))
        except RuntimeFault as fault:
            if fault.message.startswith(_NOT_PAUSED):
                self._unchanged = True
                worker.believe(replace(worker.belief, paused=None))
            if not self.sent:
                worker.believe(replace(worker.belief, weights=self._before))
            raise
        if said.get("version", version) != version:
            raise RuntimeFault("VERSION_NOT_SEEN", "the worker says that it has another version")
        worker.believe(replace(worker.belief, version=version))
        if await worker.read_version() != version:
            raise RuntimeFault("VERSION_NOT_SEEN", "the worker does not tell the new version")
        worker.believe(replace(worker.belief, weights=WeightsState.VALID))

    async def undo(self) -> None:
        if self._unchanged:
            self.worker.believe(replace(self.worker.belief, weights=self._before))
            return
        raise inconsistent()

    async def conclude(self) -> Conclusion:
        return Conclusion(flushed=FLUSHED)
