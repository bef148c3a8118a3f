"""Updates of vLLM's weights that are cut short: by the gateway's end, the engine's, a deadline, or
another client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.domain.commands import Pause, Resume
from app.domain.errors import WeightsNotValid
from app.domain.kinds import (
    Admission,
    CachePolicy,
    OperationState,
    PauseMode,
    WeightsState,
)
from app.domain.weight_sessions import CommitSession
from tests.operations.gateway import until
from tests.operations.test_vllm_weights import begun, chunk, go_on, reason, session
from tests.operations.vllm import vllm_gateway

pytestmark = pytest.mark.anyio

S = OperationState


@pytest.mark.parametrize("at", ["InitWeightTransferEngine", "UpdateWeights", "FinishWeightUpdate"])
@pytest.mark.long
async def test_the_gateway_restarted_in_mid_update(tmp_path: Path, at: str) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        answer = gateway.engine.hangs[at] = asyncio.Event()
        order = await gateway.give(session())
        await begun(gateway, order)
        if at != "InitWeightTransferEngine":
            await go_on(gateway, chunk())
            await go_on(gateway, CommitSession(1))
        await until(lambda: bool(gateway.engine.named(at)))
        await gateway.stop()
        gateway.engine.hangs.clear()
        answer.set()
        await gateway.start()
        ended = await gateway.end_of(order)
        assert reason(ended) in ("UPDATE_BROKEN_OFF", "UPDATE_INCOMPLETE")
        facts = await gateway.facts()
        touched = at != "InitWeightTransferEngine"
        assert (facts.weights.state is WeightsState.INCONSISTENT) is touched
        assert (facts.admission is Admission.PAUSED) is touched
        assert gateway.engine.orders.count("StartWeightUpdate") == int(touched)


@pytest.mark.long
async def test_a_chunk_that_takes_longer_than_the_deadline(tmp_path: Path) -> None:
    """vLLM goes on with it when its client has given up."""
    async with vllm_gateway(tmp_path) as gateway:
        held = gateway.engine.hangs["UpdateWeights"] = asyncio.Event()
        order = await gateway.give(session(), deadline_ms=1_500)
        await go_on(gateway, chunk())
        await until(lambda: bool(gateway.engine.named("UpdateWeights")))
        ended = await gateway.end_of(order)
        assert reason(ended) == "UPDATE_BROKEN_OFF"
        assert (await gateway.facts()).weights.state is WeightsState.INCONSISTENT
        held.set()
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await go_on(gateway, CommitSession(1))
        assert (await gateway.end_of(order)).state is S.SUCCEEDED


@pytest.mark.long
async def test_the_engine_restarted_in_mid_update(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await begun(gateway, order, "staged")
        await gateway.controls[0].restart()
        await go_on(gateway, chunk(1))
        ended = await gateway.end_of(order)
        assert reason(ended) in ("ENGINE_RESTARTED", "ENGINE_ERROR")
        facts = await gateway.facts()
        # It came up with the weights that it was started with.
        assert facts.weights.state is WeightsState.VALID
        assert facts.admission is Admission.OPEN


@pytest.mark.long
async def test_one_of_two_members_restarted_in_mid_update(tmp_path: Path) -> None:
    """The other one has weights that are neither old nor new."""
    async with vllm_gateway(tmp_path, 2) as gateway:
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await begun(gateway, order, "staged")
        await gateway.controls[1].restart()
        await go_on(gateway, chunk(1))
        ended = await gateway.end_of(order)
        assert (reason(ended), ended.error and ended.error.ranks) == ("ENGINE_RESTARTED", (1,))
        facts = await gateway.facts()
        assert facts.weights.state is WeightsState.INCONSISTENT
        assert gateway.engine.paused
        assert gateway.engine.weights == "half"
        with pytest.raises(WeightsNotValid):
            await gateway.give(Resume(pause_epoch=facts.pause_epoch))


@pytest.mark.long
async def test_no_start_at_a_process_that_was_not_prepared(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(Pause(mode=PauseMode.ABORT))
        order = await gateway.give(session(cache_policy=CachePolicy.KEEP))
        await begun(gateway, order)
        await until(lambda: bool(gateway.engine.named("InitWeightTransferEngine")))
        await gateway.controls[0].restart()
        await go_on(gateway, chunk())
        assert reason(await gateway.end_of(order)) == "ENGINE_RESTARTED"
        assert "StartWeightUpdate" not in gateway.engine.orders
        facts = await gateway.facts()
        assert (facts.weights.state, facts.admission) == (WeightsState.VALID, Admission.OPEN)


@pytest.mark.long
async def test_no_start_when_somebody_else_has_resumed_the_engine(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        order = await gateway.give(session())

        async def waits_for_chunks() -> bool:
            kept = await gateway.kept()
            return bool(kept.document["under_way"]["step"] == "begun")

        await until(lambda: gateway.engine.paused)
        await until(waits_for_chunks)
        gateway.engine.paused = False
        gateway.engine.running = {"r"}
        await go_on(gateway, chunk())
        assert reason(await gateway.end_of(order)) == "NOT_PAUSED"
        assert not gateway.engine.dead
        assert "StartWeightUpdate" not in gateway.engine.orders
        assert (await gateway.facts()).weights.state is WeightsState.VALID


@pytest.mark.long
async def test_facts_while_a_chunk_keeps_the_engine_from_answering(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        order = await gateway.give(session())
        await begun(gateway, order)
        held = asyncio.Event()
        for rpc in ("UpdateWeights", "IsPaused", "GetWeightVersion"):
            gateway.engine.hangs[rpc] = held
        gateway.engine.hangs.pop("IsPaused")
        gateway.engine.hangs.pop("GetWeightVersion")
        await go_on(gateway, chunk())
        await until(lambda: bool(gateway.engine.named("UpdateWeights")))
        gateway.engine.hangs["IsPaused"] = gateway.engine.hangs["GetWeightVersion"] = held
        facts = await gateway.facts()
        assert (facts.admission, facts.weights.state) == (Admission.PAUSED, WeightsState.UPDATING)
        assert facts.weights.version == "default"
        gateway.engine.hangs.clear()
        held.set()
        await go_on(gateway, CommitSession(1))
        assert (await gateway.end_of(order)).state is S.SUCCEEDED
