"""Dialect `vllm` against an engine of ours that serves `vllm.Control` too: two implementations of
one service, each written for the other's sake as little as for the double's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.domain.commands import Pause, ReleaseResources, RestoreResources, Resume
from app.domain.kinds import (
    Admission,
    ContentPolicy,
    DrainRule,
    OperationState,
    PauseMode,
    ResourceKind,
)
from tests.doubles.empty_ledger import place_empty_ledger
from tests.doubles.engine import running_engine
from tests.enginekit.full_engine import FullEngine
from tests.operations.vllm import VllmGateway

pytestmark = pytest.mark.anyio

S = OperationState
MEMORY = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)


async def test_its_life_in_another_dialect(tmp_path: Path) -> None:
    async with running_engine(
        tmp_path / "engine",
        make_engine=lambda: FullEngine(world_size=2),
        vllm_control_address="127.0.0.1:0",
    ) as double:
        await place_empty_ledger(tmp_path / "ledger.db")
        member: Any = SimpleNamespace(address=double.server.vllm_control_address)
        gateway = VllmGateway(tmp_path, [member])
        await gateway.start()
        try:
            await gateway.register_members()
            facts = await gateway.facts()
            assert facts.instance_id == double.instance_id
            paused = await gateway.carry_out(Pause(mode=PauseMode.KEEP))
            assert (paused.state, paused.result) == (
                S.SUCCEEDED,
                {"changed": True, "pause_epoch": 1},
            )
            assert (await gateway.carry_out(Resume(pause_epoch=1))).state is S.SUCCEEDED
            released = await gateway.carry_out(
                ReleaseResources(
                    resources=MEMORY, content=ContentPolicy.PRESERVE, drain=DrainRule.ABORT
                )
            )
            assert released.state is S.SUCCEEDED, released.error
            assert (await gateway.facts()).released == set(MEMORY)
            restored = await gateway.carry_out(RestoreResources(resources=MEMORY, release_epoch=1))
            assert restored.state is S.SUCCEEDED, restored.error
            facts = await gateway.facts()
            assert (facts.released, facts.admission) == (frozenset(), Admission.PAUSED)
            await gateway.carry_out(Resume(pause_epoch=facts.pause_epoch))
            assert (await gateway.facts()).admission is Admission.OPEN
        finally:
            await gateway.stop()
