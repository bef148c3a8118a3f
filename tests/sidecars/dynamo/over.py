"""A sidecar in this process, over the double of a Dynamo worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.sidecars.allowed import Allowed
from app.sidecars.dynamo.dialect import DynamoDialect
from app.sidecars.dynamo.workers import WorkerKind
from tests.doubles.dynamo_http import DynamoDouble, running_worker
from tests.doubles.dynamo_model import Worker
from tests.enginekit.client import Client, client_of, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sidecar import Sidecar


@asynccontextmanager
async def administered(
    double: DynamoDouble, data_dir: Path, **options: Any
) -> AsyncIterator[tuple[Sidecar, Client]]:
    sidecar = Sidecar(double, data_dir, **{"dialect": DynamoDialect(), **options})
    await sidecar.start()
    try:
        async with client_of(sidecar) as client:
            yield sidecar, client
    finally:
        await sidecar.stop()


@asynccontextmanager
async def over_worker(
    tmp_path: Path, kind: str = "vllm", **worker: Any
) -> AsyncIterator[tuple[DynamoDouble, Client, Path]]:
    """With the folder of weights and adapters that orders may name."""
    root = tmp_path / "files"
    model = checkpoint(root / "model", 1)
    (root / "lora").mkdir()
    dialect = DynamoDialect(kind=WorkerKind(kind), model_path=model)
    allowed = Allowed(weights_roots=(root,), lora_roots=(root,))
    async with (
        running_worker(Worker(kind, **worker)) as double,
        administered(double, tmp_path / "data", dialect=dialect, allowed=allowed) as (_, client),
    ):
        yield double, client, root


async def asked(worker: Worker, tokens: int, **request: Any) -> asyncio.Task[int]:
    """A request that came by Dynamo's own plane, once it is in flight. How many tokens it got."""

    async def read() -> int:
        return len([token async for token in worker.generate(tokens, **request)])

    before = len(worker.requests)
    task = asyncio.create_task(read())
    await until(lambda: len(worker.requests) > before or task.done())
    return task
