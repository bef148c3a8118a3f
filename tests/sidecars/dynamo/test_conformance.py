"""The sidecar holds what an engine of this contract promises, as far as it takes orders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.conformance.case import Verdict
from app.conformance.connection import Listener
from app.conformance.placing import Places
from app.conformance.trial import Options
from app.sidecars.allowed import Allowed
from app.sidecars.dynamo.dialect import DynamoDialect
from app.sidecars.dynamo.workers import WorkerKind
from tests.conformance.judging import failures, ids_of, judged
from tests.doubles.dynamo_http import running_worker
from tests.doubles.dynamo_model import Worker
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.dynamo.over import administered

pytestmark = pytest.mark.anyio

# The worker without a pause takes requests again with the last of its memory, whoever paused.
OPENS_ITSELF = {"release.closes-admission"}


@asynccontextmanager
async def _options(tmp_path: Path, kind: str) -> AsyncIterator[Options]:
    root = tmp_path / "weights"
    new, model = checkpoint(root / "new", 2), checkpoint(tmp_path / "model", 1)
    for below in ("scratch", "adapter"):
        (root / below).mkdir()
    async with (
        running_worker(Worker(kind)) as double,
        administered(
            double,
            tmp_path / "data",
            dialect=DynamoDialect(kind=WorkerKind(kind), model_path=model),
            allowed=Allowed(weights_roots=(root,), lora_roots=(root,)),
        ) as (sidecar, _),
    ):
        yield Options(
            admin=Listener(address=sidecar.admin_address),
            destructive=True,
            weights=str(new),
            weights_copy=new,
            lora=str(root / "adapter"),
            places=Places(scratch=root / "scratch"),
            patience_s=30.0,
        )


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kind", ["vllm", "vllm-sidecar", "sglang", "trtllm"])
async def test_everything_that_it_offers(tmp_path: Path, kind: str) -> None:
    """No requests come through it, so that cases which need some are not tried."""
    async with _options(tmp_path, kind) as options:
        report = await judged(options)
    failed = ids_of(report, Verdict.FAIL)
    assert failed == (OPENS_ITSELF if kind == "trtllm" else set()), failures(report)
    assert report.left_behind is None
    assert len(report.of(Verdict.PASS)) > (40 if kind == "vllm" else 20)
