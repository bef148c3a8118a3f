"""The sidecar holds what an engine of this contract promises, over a double of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.conformance.case import Verdict
from app.conformance.connection import Listener
from app.conformance.trial import Options
from tests.conformance.judging import failures, ids_of, judged
from tests.doubles.trtllm_http import running_trtllm
from tests.sidecars.sidecar import running_sidecar
from tests.sidecars.trtllm.running import dialect

pytestmark = pytest.mark.anyio

# What TensorRT-LLM's server does not have: updates, caches, adapters, profiles, sessions.
NOT_OFFERED = (
    "session.", "reconfigure.", "credentials.", "kvevents.", "update.", "flush.", "lora.",
    "profiling.", "rank.", "restart.", "unsupported.",
)  # fmt: skip
# It cannot freeze, and drops no weights.
NOT_SHOWN = {
    "cancel.not-offered",
    "pause.keep-continues",
    "refusal.model-required",
    "release.discard-under-keep",
    "release.discarded-weights",
}
# It parks nothing more while something is parked, so that what is released cannot grow: refused
# before it is sent, and a promise that is not kept all the same.
NOT_KEPT = {"release.staged"}


@asynccontextmanager
async def _options(tmp_path: Path) -> AsyncIterator[Options]:
    async with (
        running_trtllm(token_s=0.004) as trtllm,
        running_sidecar(trtllm, tmp_path / "data", dialect=dialect(only_way=True)) as sidecar,
    ):
        yield Options(
            admin=Listener(address=sidecar.admin_address),
            inference=Listener(address=sidecar.inference_address),
            destructive=True,
            patience_s=30.0,
        )


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_everything_that_it_offers(tmp_path: Path) -> None:
    async with _options(tmp_path) as options:
        report = await judged(options)
    assert ids_of(report, Verdict.FAIL) == NOT_KEPT, failures(report)
    assert report.left_behind is None
    absent = ids_of(report, Verdict.NOT_APPLICABLE)
    assert {one for one in absent if not one.startswith(NOT_OFFERED)} == NOT_SHOWN
