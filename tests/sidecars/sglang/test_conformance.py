"""The sidecar of SGLang holds what an engine of this contract promises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.conformance.connection import Listener
from app.conformance.placing import Places
from app.conformance.trial import Options
from app.sidecars.allowed import Allowed
from app.sidecars.sglang.dialect import SglangDialect
from tests.doubles.sglang_http import running_sglang
from tests.sidecars.checkpoints import adapter, checkpoint
from tests.sidecars.promises import all_holds, the_gist_holds
from tests.sidecars.sidecar import running_sidecar

pytestmark = pytest.mark.anyio

NOT_OFFERED = (
    "session.", "reconfigure.", "credentials.", "kvevents.", "rank.", "restart.", "unsupported.",
)  # fmt: skip
NOT_SHOWN = {
    "refusal.model-required",
    "cancel.not-offered",
    "release.refuses",
    "pause.refuse",
    "pause.hold-and-refuse",
    "lora.evicts",
    "update.nobody-joins",
    "abort.kv-session",
}


@asynccontextmanager
async def _options(tmp_path: Path) -> AsyncIterator[Options]:
    root = tmp_path / "weights"
    new = checkpoint(root / "new", 2)
    (root / "scratch").mkdir()
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    async with (
        running_sglang(checkpoint(tmp_path / "model", 1), model={"token_s": 0.004}) as sglang,
        running_sidecar(
            sglang,
            tmp_path / "data",
            dialect=SglangDialect(profile_root=profiles),
            allowed=Allowed(weights_roots=(root,), lora_roots=(root,)),
        ) as sidecar,
    ):
        yield Options(
            admin=Listener(address=sidecar.admin_address),
            inference=Listener(address=sidecar.inference_address),
            destructive=True,
            weights=str(new),
            weights_copy=new,
            lora=str(adapter(root / "adapter")),
            places=Places(scratch=root / "scratch", shared_prefix="chadburn-"),
            patience_s=30.0,
        )


@pytest.mark.long
async def test_the_gist(tmp_path: Path) -> None:
    async with _options(tmp_path) as options:
        await the_gist_holds(options)


@pytest.mark.long
@pytest.mark.timeout(1_800)
async def test_everything_that_it_offers(tmp_path: Path) -> None:
    async with _options(tmp_path) as options:
        await all_holds(options, NOT_OFFERED, NOT_SHOWN)
