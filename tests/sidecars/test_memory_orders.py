"""Release and restore, by the sleep that vLLM has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.engine_http import After, Answer
from tests.doubles.vllm_http import running_vllm
from tests.enginekit.client import pb, refused, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sidecar import administered, asked

pytestmark = pytest.mark.anyio

SLEEPS = ("/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume")


async def test_both_are_released_and_restored_one_after_the_other(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        model = vllm.model
        events = await client.order(client.release("weights", "kv_cache"))
        assert events[-1].HasField("completed")
        warned = [event.warning.reason for event in events if event.HasField("warning")]
        assert warned == ["KV_CACHE_NOT_KEPT"]
        assert vllm.orders(*SLEEPS)[-1] == "/sleep?level=1&mode=keep"
        assert model.asleep == {"weights", "kv_cache"}
        epochs = await client.profile()
        # vLLM itself says yes, and runs into memory that is away.
        assert await refused(client.stream(client.resume(epochs.pause_epoch)))

        restored = await client.completed(client.restore("weights", epoch=epochs.release_epoch))
        assert list(restored.restore_resources.released) == [pb.RESOURCE_KIND_KV_CACHE]
        assert vllm.orders(*SLEEPS)[-1] == "/wake_up?tags=weights"
        events = await client.order(client.restore("kv_cache", epoch=epochs.release_epoch))
        warned = [event.warning.reason for event in events if event.HasField("warning")]
        assert warned == ["ADMISSION_OPENED_BRIEFLY"]
        assert vllm.orders(*SLEEPS)[-2:] == [
            "/wake_up?tags=kv_cache",
            "/pause?mode=keep&clear_cache=false",
        ]
        assert (model.asleep, model.pause_state) == (set(), "all")
        assert await client.admission() == "paused"
        await client.completed(client.resume(epochs.pause_epoch))
        assert model.pause_state == "open"


@pytest.mark.long
async def test_a_wake_up_that_fails_after_it_was_done_leaves_nobody_served(tmp_path: Path) -> None:
    """With its last memory the engine opens itself, whatever it then answers."""
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        await client.completed(client.release("weights", "kv_cache"))
        epoch = (await client.profile()).release_epoch
        vllm.next("/wake_up", After(503, {"error": {"message": "busy"}}))
        await client.failed(client.restore("weights", "kv_cache", epoch=epoch))
        assert vllm.model.pause_state == "all"
        assert await client.admission() == "paused"


@pytest.mark.long
async def test_tags_go_one_by_one(tmp_path: Path) -> None:
    """`tags=weights,kv_cache` is one tag that nobody has, and answers 200."""
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        await client.completed(client.release("weights", "kv_cache"))
        epoch = (await client.profile()).release_epoch
        await client.completed(client.restore("weights", "kv_cache", epoch=epoch))
        assert vllm.orders("/wake_up") == ["/wake_up?tags=kv_cache&tags=weights"]
        assert not vllm.bodies("/wake_up")


async def test_discarded_weights_keep_the_kv_away_until_they_are_updated(tmp_path: Path) -> None:
    """The engine opens itself with the last of its memory, and would serve what is no weights."""
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        await client.completed(client.release("weights", content="discard"))
        assert vllm.orders("/sleep") == ["/sleep?level=2&mode=keep"]
        profile = await client.profile()
        assert list(profile.state.released) == [pb.RESOURCE_KIND_WEIGHTS]
        await client.completed(client.restore("weights", epoch=profile.release_epoch))
        state = (await client.profile()).state
        assert state.weights.state == pb.WEIGHTS_STATE_MISSING
        assert vllm.model.asleep == {"kv_cache"}
        assert vllm.model.pause_state != "open"


@pytest.mark.long
async def test_kv_alone_where_the_engine_can(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        await client.completed(client.release("kv_cache", content="discard"))
        assert vllm.orders("/sleep", "/release_kv_cache_memory") == ["/release_kv_cache_memory"]
        assert vllm.model.asleep == {"kv_cache"}
        # What sleeps ignores being told to sleep: it is woken first, and paused meanwhile.
        await client.completed(client.release("weights"))
        assert vllm.orders(*SLEEPS)[-3:] == [
            "/wake_up?tags=kv_cache",
            "/pause?mode=keep&clear_cache=false",
            "/sleep?level=1&mode=keep",
        ]
        assert vllm.model.asleep == {"weights", "kv_cache"}


@pytest.mark.long
async def test_a_device_that_cannot_release_kv_alone(tmp_path: Path) -> None:
    """There vLLM fails half way, and is asleep for ever by its own word."""
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1), device="cpu") as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        await client.completed(client.release("kv_cache", content="discard"))
        assert vllm.orders("/sleep", "/release_kv_cache_memory", "/wake_up") == [
            "/sleep?level=1&mode=keep",
            "/wake_up?tags=weights",
        ]
        assert vllm.model.asleep == {"kv_cache"}


@pytest.mark.long
async def test_a_release_that_fails_half_way_is_cleared_up(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        vllm.model.on_cpu = True  # and does not say so
        failed = await client.failed(client.release("kv_cache", content="discard"))
        assert failed.reason == "ENGINE_REFUSED"
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert vllm.model.asleep == set()
        assert await client.admission() == "open"  # as it was
        assert vllm.model.pause_state == "open"


@pytest.mark.long
async def test_frozen_requests_keep_their_kv(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        request = await asked(vllm, "a")
        await client.completed(client.pause("keep"))
        failed = await client.failed(client.release("weights"))
        assert failed.reason == "REQUESTS_FROZEN"
        assert not vllm.orders("/sleep")
        vllm.model.abort_ids([])
        await request


@pytest.mark.long
async def test_a_lost_answer_to_a_discard_leaves_weights_missing(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        vllm.next("/sleep", Answer(500, {"error": {"message": "no"}}))
        failed = await client.failed(client.release("weights", "kv_cache", content="discard"))
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        state = (await client.profile()).state
        bad = (pb.WEIGHTS_STATE_MISSING, pb.WEIGHTS_STATE_INCONSISTENT)
        assert state.weights.state in bad


@pytest.mark.long
async def test_without_sleep_mode_nothing_is_offered(tmp_path: Path) -> None:
    """vLLM takes the order all the same, and gives nothing back."""
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1), sleep_mode=False) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        refusal = await refused(client.stream(client.release("weights")))
        assert refusal.code.name == "UNIMPLEMENTED"


@pytest.mark.long
async def test_somebody_else_puts_it_to_sleep(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        await vllm.model.sleep(1, "abort")

        async def released() -> bool:
            return len((await client.profile()).state.released) == 2

        await until(released)
        epoch = (await client.profile()).pause_epoch
        assert await refused(client.stream(client.resume(epoch)))
        assert vllm.model.pause_state != "open"
