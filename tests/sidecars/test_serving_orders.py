"""Pause, resume and flush over a vLLM server, and requests meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.engine_http import After, Answer
from tests.doubles.vllm_http import running_vllm
from tests.enginekit.client import Client, pb, refused, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sidecar import administered, asked

pytestmark = pytest.mark.anyio

EVERY_CACHE = [pb.CACHE_KIND_PREFIX, pb.CACHE_KIND_MULTIMODAL, pb.CACHE_KIND_ENCODER]


async def test_a_pause_by_mode_in_the_query_and_its_resume(tmp_path: Path) -> None:
    words = {"drain": "wait", "abort": "abort", "keep": "keep"}
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        for mode, word in words.items():
            paused = await client.completed(client.pause(mode))
            assert paused.changed
            assert vllm.model.mode == word
            assert vllm.orders("/pause")[-1] == f"/pause?mode={word}&clear_cache=false"
            await client.completed(client.resume(paused.pause.pause_epoch))
            assert vllm.model.pause_state == "open"
            assert await client.admission() == "open"
        assert len(vllm.orders("/pause")) == 3
        assert not vllm.bodies("/pause")


async def test_requests_through_the_sidecar_under_each_pause(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        kept = client.generate(stopping={"max_tokens": 2000})
        await kept.first()
        frozen = await client.completed(client.pause("keep"))
        assert frozen.pause.requests_kept == 1
        assert await refused(client.stream(client.pause("drain")))  # they could not finish
        vllm.model.token_s = 0
        await client.completed(client.resume(frozen.pause.pause_epoch))
        assert await kept.finish_reason() == "LENGTH"

        vllm.model.token_s = 0.003
        ended = client.generate(stopping={"max_tokens": 2000})
        await ended.first()
        paused = await client.completed(client.pause("abort"))
        assert paused.pause.requests_aborted == 1
        assert await ended.finish_reason() == "CANCELLED"
        held = client.generate(stopping={"max_tokens": 3})
        await client.completed(client.resume(paused.pause.pause_epoch))
        assert await held.finish_reason() == "LENGTH"


@pytest.mark.long
async def test_a_drain_waits_for_requests_that_went_to_the_engine_itself(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        request = await asked(vllm, "a", tokens=80)
        await client.completed(client.pause("drain"))
        assert await request == "length"


async def test_a_drain_that_is_called_off_leaves_the_engine_open(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        request = await asked(vllm, "a")
        drain = await client.begin(client.pause("drain"))
        operation_id = drain.events[0].operation_id
        await until(lambda: vllm.model.mode == "wait")
        assert await client.admission() == "draining"
        await client.cancel(operation_id)
        assert (await drain.end()).HasField("cancelled")
        assert vllm.model.pause_state == "open"
        assert await client.admission() == "open"
        assert not request.done()
        vllm.model.abort_ids([])
        await request


async def test_frozen_requests_of_others_keep_a_drain_away(tmp_path: Path) -> None:
    """vLLM itself answers at once that it has drained, and has not."""
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        request = await asked(vllm, "a")
        await client.completed(client.pause("keep"))
        failed = await client.failed(client.pause("drain"))
        assert failed.reason == "REQUESTS_FROZEN"
        assert vllm.model.mode == "keep"
        paused = await client.completed(client.pause("abort"))
        assert paused.pause.requests_aborted == 1
        assert await request == "abort"


@pytest.mark.long
async def test_a_pause_that_somebody_resumes_meanwhile_is_none(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        vllm.next("/pause", Answer(200, {"status": "paused"}))
        failed = await client.failed(client.pause("abort"))
        assert failed.reason == "PAUSE_NOT_SEEN"
        assert await client.admission() == "open"


async def test_what_the_caches_say_of_being_emptied(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        flushed = await client.completed(client.flush(caches=EVERY_CACHE))
        assert len(flushed.flush_caches.caches) == 3
        vllm.next("/reset_prefix_cache", After(200, {"success": False}))
        failed = await client.failed(client.flush())
        assert (failed.reason, failed.retryable) == ("CACHE_IN_USE", True)


@pytest.mark.long
async def test_somebody_else_pauses_and_resumes(tmp_path: Path) -> None:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data") as (_, client),
    ):
        before = await client.profile()
        await vllm.model.pause("abort")
        await until(lambda: _admission(client, "paused"))
        seen = await client.profile()
        assert seen.state.pause.operation_id == "external"
        assert seen.pause_epoch > before.pause_epoch
        assert seen.revision > before.revision
        vllm.model.resume()
        await until(lambda: _admission(client, "open"))
        await vllm.model.pause("abort")
        await until(lambda: _admission(client, "paused"))
        epoch = (await client.profile()).pause_epoch
        await client.completed(client.resume(epoch))
        assert vllm.model.pause_state == "open"


async def _admission(client: Client, wanted: str) -> bool:
    return await client.admission() == wanted


@pytest.mark.long
async def test_a_version_that_turns_new_requests_away(tmp_path: Path) -> None:
    """0.33, and a pause by somebody else that has not been seen yet."""
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1), model={"flavour": 33}) as vllm,
        administered(vllm, tmp_path / "data", look_s=60) as (_, client),
    ):
        await vllm.model.pause("abort")
        refusal = await client.generate(stopping={"max_tokens": 3}).refused()
        assert (refusal.code.name, refusal.reason) == ("UNAVAILABLE", "DRAINING")


@pytest.mark.long
async def test_a_drain_that_somebody_resumes_is_none(tmp_path: Path) -> None:
    """vLLM answers in the end that it is paused, and is not."""
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1)) as vllm,
        administered(vllm, tmp_path / "data", look_s=60) as (_, client),
    ):
        request = await asked(vllm, "a", tokens=400)
        drain = await client.begin(client.pause("drain"))
        await until(lambda: vllm.model.mode == "wait")
        vllm.model.resume()
        end = await drain.end()
        assert end.failed.reason == "PAUSE_NOT_SEEN"
        assert await request == "length"
        assert await client.admission() == "open"


def test_calls_that_make_a_worker_do_anything_are_not_there() -> None:
    """One that runs out of time gives its answer to the next."""
    folder = Path(__file__).parents[2] / "app" / "sidecars"
    assert not [file for file in folder.rglob("*.py") if "collective_rpc" in file.read_text()]
