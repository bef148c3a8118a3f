"""Engines that end, hang, and come back; and sidecars that do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.sidecars.http import Patience
from app.sidecars.serving import CannotServe
from tests.doubles.engine_http import Die, Hang
from tests.doubles.vllm_http import running_vllm
from tests.doubles.vllm_model import Vllm
from tests.enginekit.client import Client, client_of, pb, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sidecar import Sidecar, administered

pytestmark = pytest.mark.anyio


async def _lost(client: Client) -> bool:
    return bool((await client.profile()).state.ranks)


async def test_an_engine_that_ends_is_told_and_orders_end_with_it(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        vllm.next("/pause", Die())
        failed = await client.failed(client.pause("abort"))
        assert failed.reason == "ENGINE_DIED"
        await until(lambda: _lost(client))
        state = (await client.profile()).state
        assert state.ranks[0].state == pb.RANK_STATE_FAILED
        assert state.ranks[0].message == "the engine has ended"
        assert state.admission == pb.ADMISSION_STATE_UNSPECIFIED
        assert (await client.failed(client.flush())).reason == "ENGINE_DIED"
        assert state.weights.state in (
            pb.WEIGHTS_STATE_UNKNOWN,
            pb.WEIGHTS_STATE_INCONSISTENT,
        )


@pytest.mark.long
async def test_a_paused_engine_is_not_a_dead_one(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        await client.completed(client.pause("keep"))
        await vllm.model.sleep(1, "keep")
        assert not (await client.profile()).state.ranks
        assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_VALID


async def test_an_engine_that_is_started_anew_is_another_instance(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 1)
    async with (
        running_vllm(model) as vllm,
        administered(vllm, tmp_path / "data") as (sidecar, client),
    ):
        await client.completed(client.pause("abort"))
        key = client.key()
        vllm.next("/resume", Hang())
        order = client.resume((await client.profile()).pause_epoch, idempotency_key=key)
        resuming = client.stream(order)
        await until(lambda: vllm.orders("/resume"))
        address, instance = sidecar.admin_address, sidecar.instance_id
        await vllm.restart(Vllm(model))
        await until(lambda: len(sidecar.lives) == 2, 30)
        resuming.cancel()
        assert sidecar.admin_address == address
        assert sidecar.instance_id != instance
        async with client_of(sidecar) as other:
            ended = await other.operation(idempotency_key=key)
            assert ended.state == pb.ADMIN_OPERATION_STATE_FAILED
            assert await other.admission() == "open"  # as that engine is


@pytest.mark.long
async def test_a_paused_engine_outlives_its_sidecar(tmp_path: Path) -> None:
    async with running_vllm(checkpoint(tmp_path / "model", 1)) as vllm:
        async with administered(vllm, tmp_path / "data") as (_, client):
            await client.completed(client.release("weights", "kv_cache"))
            before = await client.profile()
        async with administered(vllm, tmp_path / "data") as (_, client):
            after = await client.profile()
            assert after.state.admission == pb.ADMISSION_STATE_PAUSED
            assert after.state.released == before.state.released
            assert after.pause_epoch > before.pause_epoch
            assert after.release_epoch > before.release_epoch
            await client.completed(client.restore("weights", "kv_cache", epoch=after.release_epoch))
            await client.completed(client.resume(after.pause_epoch))
        assert vllm.model.pause_state == "open"


async def test_a_second_sidecar_writes_nothing_over_what_the_first_one_knows(
    tmp_path: Path,
) -> None:
    """Neither of the same engine nor of another one, for which it would find no notes."""
    model, data = checkpoint(tmp_path / "model", 1), tmp_path / "data"
    async with (
        running_vllm(model) as vllm,
        running_vllm(model, instance="2") as another,
        administered(vllm, data) as (_, client),
    ):
        await client.completed(client.pause("abort"))
        known = (data / "engine.json").read_bytes()
        for beside in (another, vllm):
            with pytest.raises(CannotServe, match="in use"):
                await Sidecar(beside, data).start()
            assert (data / "engine.json").read_bytes() == known


@pytest.mark.long
async def test_an_answer_that_does_not_come_is_no_answer(tmp_path: Path) -> None:
    """The pause has taken effect; the order failed, and was taken back, which was seen."""
    patience = Patience(read_s=5.0, control_s=0.3, watch_s=0.1)
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data", patience=patience) as (_, client),
    ):
        vllm.next("/reset_prefix_cache", Hang())
        failed = await client.failed(client.flush())
        assert failed.reason == "ENGINE_NOT_ANSWERING"
        vllm.next("/pause", Hang())
        failed = await client.failed(client.pause("abort", deadline_ms=500))
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert vllm.model.pause_state == "open"
        assert await client.admission() == "open"


@pytest.mark.long
async def test_the_engine_may_come_after_its_sidecar(tmp_path: Path) -> None:
    async with running_vllm(checkpoint(tmp_path / "model", 1)) as vllm:
        await vllm.stop()
        sidecar = Sidecar(vllm, tmp_path / "data")
        starting = asyncio.create_task(sidecar.start())
        await asyncio.sleep(0)
        assert not sidecar.lives
        await vllm.start()
        await starting
        async with client_of(sidecar) as client:
            assert await client.admission() == "open"
        await sidecar.stop()


async def test_notes_that_are_damaged_are_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "engine.json").write_text("{")
    async with running_vllm(checkpoint(tmp_path / "model", 1)) as vllm:
        with pytest.raises(CannotServe):
            await Sidecar(vllm, tmp_path / "data").start()
