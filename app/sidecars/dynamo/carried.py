"""An order on its way to a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.enginekit.runtime import Order
from app.sidecars.carried import Carried
from app.sidecars.dynamo.worker import DynamoWorker, NothingSent


class WorkerOrder(Carried):
    def __init__(self, order: Order, worker: DynamoWorker) -> None:
        super().__init__(order)
        self.worker = worker

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Around the first call that may change something. What has not reached the worker needs no
        undoing, and one without the route would not have that of the undoing either."""
        before, self.sent = self.sent, True
        try:
            yield
        except NothingSent:
            self.sent = before
            raise
