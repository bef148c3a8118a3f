"""A Dynamo worker as a kind of engine that a sidecar administers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.sidecars.allowed import Allowed
from app.sidecars.dynamo.answers import worker_text
from app.sidecars.dynamo.discovery import Clocks, Discovered, discover
from app.sidecars.dynamo.runtime import DynamoRuntime
from app.sidecars.dynamo.watching import DynamoWatch
from app.sidecars.dynamo.worker import DynamoWorker
from app.sidecars.dynamo.workers import WorkerKind
from app.sidecars.http import EngineHttp, Patience
from app.sidecars.notes import Notes


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoDialect:
    """Implements ``app.sidecars.serving.Dialect``. `kind`, `model`: where the worker does not tell
    them. `model_path`: the checkpoint that the engine was started with, which new weights have to
    fit; None: not known here."""

    kind: WorkerKind | None = None
    model: str | None = None
    model_path: Path | None = None
    clocks: Clocks = field(default_factory=Clocks)
    name = "dynamo"

    def connect(self, url: str, patience: Patience) -> EngineHttp:
        # Its /health is not liveness: 503 is also that of a worker which is not ready.
        return EngineHttp(url, words=worker_text, alive_path="/metrics", patience=patience)

    async def discover(self, http: EngineHttp, _allowed: Allowed) -> Discovered:
        return await discover(http, self.clocks, kind=self.kind, model=self.model)

    async def attach(
        self, http: EngineHttp, found: Discovered, allowed: Allowed, notes: Notes, look_s: float
    ) -> tuple[DynamoRuntime, DynamoWatch]:
        worker = await DynamoWorker.attach(http, found, allowed, notes)
        watch = DynamoWatch(worker, look_s)
        return DynamoRuntime(worker, watch, self.model_path), watch
