"""A TensorRT-LLM server that does not mean what it says, or does not take what it is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from app.rpc.openengine.v1.lifecycle_pb2 import HEALTH_STATE_READY, HealthRequest
from tests.doubles.engine_http import After, Answer
from tests.doubles.trtllm_http import Memory, TrtllmDouble
from tests.enginekit.client import pb, until
from tests.sidecars.trtllm.running import trtllm_and_sidecar

pytestmark = pytest.mark.anyio


def _takes_no_more_from(trtllm: TrtllmDouble, order: str) -> None:
    """No signed call at all, reads neither, from the first order of that path on."""
    judge = trtllm.refused

    def refused(request: Request, path: str) -> Response | None:
        if path == order:
            trtllm.options["most_nonces"] = 0
            trtllm.nonces.clear()
        return judge(request, path)

    trtllm.refused = refused  # type: ignore[method-assign]


@pytest.mark.parametrize("order", ["release", "restore"])
async def test_an_order_that_is_not_taken_has_done_nothing_and_is_not_undone(
    tmp_path: Path, order: str
) -> None:
    """Whether it can be read afterwards or not: what was judged before it began needs no proof."""
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        request: Any = client.release("weights")
        if order == "restore":
            await client.completed(request)
            request = client.restore("weights", epoch=(await client.profile()).release_epoch)
        path = "/release_memory" if order == "release" else "/resume_memory"
        before = trtllm.memory.state
        _takes_no_more_from(trtllm, path)
        failed = await client.failed(request)
        assert failed.reason == "SIGNATURE_REFUSED"
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert trtllm.memory.state == before
        state = (await client.profile()).state
        assert not state.ranks
        assert state.weights.state != pb.WEIGHTS_STATE_INCONSISTENT
        assert bool(state.released) == (order == "restore")
        assert [called for called, _ in trtllm.orders()][-1] == path


async def test_a_call_that_was_made_twice_on_its_way_is_taken_back(tmp_path: Path) -> None:
    """The first one was taken; what is heard is that the number of the second was used."""
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        used = {"error": {"message": "nonce has already been used"}}
        trtllm.next("/release_memory", After(401, used))
        failed = await client.failed(client.release("weights"))
        assert failed.reason == "SIGNATURE_REFUSED"
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert [path for path, _ in trtllm.orders()] == ["/release_memory", "/resume_memory"]
        assert trtllm.memory.state == "running"


async def test_what_others_have_parked_meanwhile_is_not_woken(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        release = trtllm.memory.release

        async def theirs_first(tags: list[str]) -> None:
            await release(["kv_cache"])
            await release(tags)

        trtllm.memory.release = theirs_first  # type: ignore[method-assign]
        failed = await client.failed(client.release("weights"))
        assert failed.reason == "ENGINE_REFUSED"
        assert trtllm.memory.parked == ["kv_cache"]
        assert len(trtllm.orders()) == 1


async def test_what_still_wakes_is_not_restored(tmp_path: Path) -> None:
    """However little it says is parked."""
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        await client.completed(client.release("weights"))
        memory = trtllm.memory

        async def resume(_: list[str] | None) -> None:
            memory.state, memory.parked = "waking", []

        memory.resume = resume  # type: ignore[method-assign,assignment]
        epoch = (await client.profile()).release_epoch
        order = client.restore("weights", epoch=epoch, deadline_ms=600)
        waiting = asyncio.create_task(client.failed(order))
        await until(lambda: memory.state == "waking" or waiting.done())
        memory.state = "failed"
        assert (await waiting).effect == pb.FAILURE_EFFECT_APPLIED_IN_PART

        async def seen() -> bool:
            state = (await client.profile()).state
            return state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT

        await until(seen)


@pytest.mark.long
async def test_only_what_says_that_the_engine_has_ended_is_its_end(tmp_path: Path) -> None:
    """What stands in between may answer for it, and be gone again."""
    async with trtllm_and_sidecar(tmp_path) as (trtllm, sidecar, client):
        for status in (500, 429, 307):
            trtllm.next("/health", Answer(status, None))
            seen = len(trtllm.calls)
            await until(lambda seen=seen: len(trtllm.calls) > seen + 3)  # type: ignore[misc]
        await client.completed(client.release("weights"))
        assert len(sidecar.lives) == 1
        trtllm.next("/health", Answer(503, None))
        await until(lambda: len(sidecar.lives) == 2, 30)


@pytest.mark.long
async def test_another_process_behind_a_memory_that_failed_gets_no_order(tmp_path: Path) -> None:
    """It took its place so quickly that nobody saw it gone."""
    async with trtllm_and_sidecar(tmp_path, look_s=3600.0) as (trtllm, sidecar, client):
        trtllm.memory.fails = 1
        await client.failed(client.release("weights"))

        async def looked_at() -> bool:
            state = (await client.profile()).state
            return not state.ranks and state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT

        await until(looked_at)
        seen = len(trtllm.calls)
        await until(lambda: len(trtllm.calls) > seen + 3)  # nor is anybody looking
        sent = len(trtllm.orders())
        trtllm.memory = Memory()
        assert (await client.failed(client.release("weights"))).reason == "ENGINE_RESTARTED"
        assert len(trtllm.orders()) == sent
        await until(lambda: len(sidecar.lives) == 2, 30)


async def test_the_engine_s_own_probe_has_to_come_through(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        probe = HealthRequest(include_inference_probe=True)
        assert (await client.control.Health(probe)).state == HEALTH_STATE_READY
        trtllm.next("/health_generate", Answer(500, None))
        assert (await client.control.Health(probe)).state != HEALTH_STATE_READY
