"""Servers that end, are stuck, and come back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from app.sidecars.serving import CannotServe
from app.sidecars.sglang.dialect import SglangDialect
from tests.doubles.engine_http import Die, Hang
from tests.doubles.sglang_http import running_sglang
from tests.doubles.sglang_model import Sglang, Snapshot
from tests.enginekit.client import client_of, pb, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sglang.running import PATIENCE, Served, asked, served
from tests.sidecars.sidecar import administered

pytestmark = pytest.mark.anyio


async def _lost(it: Served) -> bool:
    return bool((await it.client.profile()).state.ranks)


async def test_a_server_that_ends_under_an_order(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        it.sglang.next("/update_weights_from_disk", Die())
        failed = await it.client.failed(it.client.update("v2", pause="abort", disk=it.disk))
        assert failed.reason == "ENGINE_DIED"
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        await until(lambda: _lost(it))


async def test_a_server_that_is_started_anew_is_another_instance(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.client.completed(it.client.release("kv_cache", content="discard"))
        key, instance = it.client.key(), it.sidecar.instance_id
        it.sglang.next("/resume_memory_occupation", Hang())
        epoch = (await it.client.profile()).release_epoch
        order = it.client.restore("kv_cache", epoch=epoch, idempotency_key=key)
        restoring = it.client.stream(order)
        await until(lambda: it.sglang.orders("/resume_memory_occupation"))
        await it.sglang.restart(Sglang(checkpoint(tmp_path / "model", 1)))
        await until(lambda: len(it.sidecar.lives) == 2, 30)
        restoring.cancel()
        assert it.sidecar.instance_id != instance
        async with client_of(it.sidecar) as other:
            ended = await other.operation(idempotency_key=key)
            assert ended.state == pb.ADMIN_OPERATION_STATE_FAILED
            state = (await other.profile()).state
            assert not state.released
            assert await other.admission() == "open"


@pytest.mark.long
async def test_an_order_is_for_the_life_that_it_was_given_to(tmp_path: Path) -> None:
    """What has taken its place meanwhile is asked who it is before it is sent anything."""
    async with served(tmp_path, look_s=60) as it:
        await it.client.completed(it.client.pause("abort"))
        sent = len(it.sglang.orders())
        it.model.seed += 1
        epoch = (await it.client.profile()).pause_epoch
        failed = await it.client.failed(it.client.resume(epoch))
        assert failed.reason == "ENGINE_RESTARTED"
        assert it.sglang.orders()[sent:] == []


async def test_a_scheduler_that_is_stuck_and_one_that_is_held(tmp_path: Path) -> None:
    """A pause that holds it is no reason to call it dead; what holds it for good is."""
    async with served(tmp_path) as it:
        await it.client.completed(it.client.pause("keep"))
        assert not await _lost(it)
        await it.client.completed(it.client.resume((await it.client.profile()).pause_epoch))
        it.model.stuck = True
        await until(lambda: _lost(it), 30)
        assert await it.client.health("openengine.v1.Inference") == "NOT_SERVING"
        it.model.stuck = False

        async def back() -> bool:
            return not await _lost(it)

        await until(back, 30)


async def test_a_server_that_is_met_while_it_starts(tmp_path: Path) -> None:
    """It is waited for, and not taken for one that is paused."""
    dialect = SglangDialect(stale_s=0.5)
    there = {"dialect": dialect, "patience": PATIENCE, "look_s": 0.1}
    loop = asyncio.get_running_loop()
    async with running_sglang(checkpoint(tmp_path / "model", 1)) as sglang:
        sglang.model.starting = True
        started = loop.call_later(1.0, setattr, sglang.model, "starting", False)
        async with administered(sglang, tmp_path / "data", **there) as (_, client):
            assert loop.time() >= started.when()
            assert (await client.profile()).state.admission == pb.ADMISSION_STATE_OPEN


@pytest.mark.long
async def test_a_pause_outlives_the_sidecar(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.client.completed(it.client.pause("abort"))
        await it.sidecar.stop()
        await it.sidecar.start()
        async with client_of(it.sidecar) as client:
            profile = await client.profile()
            assert profile.state.pause.mode == pb.PAUSE_MODE_ABORT
            await client.completed(client.resume(profile.pause_epoch))
        assert not it.model.front_paused


@pytest.mark.long
async def test_servers_that_are_not_known_here(tmp_path: Path) -> None:
    with pytest.raises(CannotServe, match="not known here"):
        async with served(tmp_path, version="0.4.9"):
            pass


async def test_an_account_that_is_old_says_nothing_of_a_pause(tmp_path: Path) -> None:
    """Held by the scheduler while it is believed that the front end alone holds requests back: what
    its last account shows as running does not run."""
    async with served(tmp_path) as it:
        request = await asked(it.sglang, "a")
        await it.client.completed(it.client.pause("abort"))
        await request
        it.model.held = True  # by somebody else, in place
        it.model.last = Snapshot(time.time() - 60, 1, 0)
        looks = len(it.sglang.calls)
        await until(lambda: _looked(it, looks))
        assert await it.client.admission() == "paused"


def _looked(it: Served, since: int) -> bool:
    """At how the requests stand, twice."""
    return [path for _, path, _, _ in it.sglang.calls[since:]].count("/v1/loads") >= 2
