"""Pausing and sleeping by the endpoints: what is ordered, whose it is, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from app.domain.kinds import PauseMode, ResourceKind
from tests.enginekit.client import client_of
from tests.enginekit.client import until as settled
from tests.enginekit.minimal_engine import until
from tests.http.compat.layered import Layered

pytestmark = pytest.mark.anyio


async def said(vllm: Layered, name: str) -> bool:
    return bool((await vllm.reads(f"/{name}"))[name])


BOTH = {ResourceKind.WEIGHTS, ResourceKind.KV_CACHE}


@pytest.mark.long
async def test_a_pause_and_a_resume(vllm: Layered) -> None:
    assert await vllm.reads("/is_paused") == {"is_paused": False}
    assert await vllm.does("/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert vllm.engine.paused is PauseMode.KEEP
    assert await vllm.reads("/is_paused") == {"is_paused": True}
    assert await vllm.reads("/is_sleeping") == {"is_sleeping": True}
    assert await vllm.does("/resume") == {"status": "resumed"}
    assert await vllm.does("/resume") == {"status": "resumed"}
    ordered = await vllm.operations()
    assert [one["kind"] for one in ordered] == ["pause", "resume"]
    assert {one["principal"]["subject"] for one in ordered} == {"ada"}
    assert ordered[0]["reason"] == "vLLM endpoint /pause"


@pytest.mark.long
async def test_a_pause_clears_the_cache_unless_it_is_told_not_to(vllm: Layered) -> None:
    await vllm.does("/pause")
    assert vllm.engine.paused is PauseMode.ABORT
    await vllm.does("/resume")
    await vllm.does("/pause?clear_cache=false")
    await vllm.does("/resume")
    assert await vllm.kinds() == ["pause", "flush_caches", "resume", "pause", "resume"]


async def test_a_blind_repetition_is_the_same_order_and_the_next_pause_is_another(
    vllm: Layered,
) -> None:
    for _ in range(2):
        for _ in range(3):
            await vllm.does("/pause?mode=keep")
        await vllm.does("/resume")
    assert await vllm.kinds() == ["pause", "resume", "pause", "resume"]


@pytest.mark.long
async def test_repetitions_while_it_runs_wait_for_it(vllm: Layered) -> None:
    goes = asyncio.Event()
    vllm.engine.script("commit", until(goes))
    calls = [asyncio.create_task(vllm.post("/pause?mode=keep")) for _ in range(4)]
    await settled(vllm.kinds)
    late = asyncio.create_task(vllm.post("/pause?mode=keep"))
    other = await vllm.post("/pause?mode=abort&clear_cache=false")
    assert (other.status_code, other.headers["retry-after"]) == (503, "1")
    assert other.json()["error"].startswith("Failed to pause generation: ")
    goes.set()
    answers = await asyncio.gather(*calls, late)
    assert {answer.status_code for answer in answers} == {200}
    assert await vllm.kinds() == ["pause"]


@pytest.mark.long
async def test_a_key_of_the_caller_s_own_says_what_is_a_repetition(vllm: Layered) -> None:
    key = {"Idempotency-Key": "step-7"}
    await vllm.does("/pause?mode=keep", headers=key)
    await vllm.does("/resume")
    await vllm.does("/pause?mode=keep", headers=key)  # it was, and is not again
    assert await vllm.kinds() == ["pause", "resume"]
    reused = await vllm.post("/pause?mode=abort&clear_cache=false", headers=key)
    assert reused.status_code == 409


@pytest.mark.long
async def test_a_pause_is_lifted_by_whoever_made_it(vllm: Layered) -> None:
    await vllm.does("/pause?mode=keep", subject="bob")
    for path in ("/resume", "/wake_up"):
        refused = await vllm.post(path)
        assert refused.status_code == 409
        assert "not one of yours" in refused.text
    assert vllm.engine.paused is PauseMode.KEEP
    assert await vllm.does("/resume", subject="bob") == {"status": "resumed"}
    # Of two pauses the later one is in force.
    await vllm.does("/pause?mode=keep", subject="bob")
    await vllm.does("/pause?mode=abort&clear_cache=false")
    assert (await vllm.post("/resume", subject="bob")).status_code == 409
    await vllm.does("/resume")


@pytest.mark.long
async def test_a_pause_that_waits_is_not_lifted_before_it_holds(vllm: Layered) -> None:
    vllm.engine.stall()
    async with client_of(vllm.full.double) as direct:
        stream = direct.generate()
        await settled(lambda: vllm.engine.running)
        waiting = asyncio.create_task(vllm.post("/pause?mode=wait&clear_cache=false"))
        await settled(lambda: said(vllm, "is_paused"))
        assert (await vllm.post("/resume")).status_code == 409
        vllm.engine.go()
        assert (await waiting).status_code == 200
        assert await stream.finish_reason() == "LENGTH"
    assert await vllm.reads("/is_paused") == {"is_paused": True}


async def test_sleep_and_wake(vllm: Layered) -> None:
    assert await vllm.does("/sleep") == {"status": "sleeping", "level": 1}
    assert vllm.engine.held[0].released == BOTH
    assert (await vllm.post("/resume")).status_code == 409
    assert await vllm.does("/wake_up") == {"status": "awake", "tags": None}
    assert vllm.engine.held[0].released == frozenset()
    assert vllm.engine.paused is None
    assert await vllm.reads("/is_sleeping") == {"is_sleeping": False}
    kinds = ["pause", "release_resources", "restore_resources", "resume"]
    assert await vllm.kinds() == kinds
    contents = [one["request"].get("content") for one in await vllm.operations()]
    assert contents[1] == "preserve"


@pytest.mark.long
async def test_sleep_is_repeated_blindly(vllm: Layered) -> None:
    answers = await asyncio.gather(*(vllm.post("/sleep") for _ in range(3)))
    answers.append(await vllm.post("/sleep"))
    assert [answer.json() for answer in answers] == [{"status": "sleeping", "level": 1}] * 4
    assert await vllm.kinds() == ["pause", "release_resources"]


@pytest.mark.long
async def test_the_level_is_what_it_is(vllm: Layered) -> None:
    assert await vllm.does("/sleep?level=0") == {"status": "sleeping", "level": 0}
    assert await vllm.does("/sleep?level=1") == {"status": "sleeping", "level": 1}
    assert await vllm.does("/sleep?level=2") == {"status": "sleeping", "level": 2}
    assert await vllm.does("/sleep?level=1") == {"status": "sleeping", "level": 2}


@pytest.mark.long
async def test_what_was_discarded_does_not_serve_again_by_waking_up(vllm: Layered) -> None:
    await vllm.does("/sleep?level=2")
    assert await vllm.does("/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    assert await vllm.does("/wake_up") == {"status": "sleeping", "tags": None}
    assert (await vllm.post("/resume")).status_code == 409  # there is nothing to serve with


@pytest.mark.long
async def test_waking_up_by_parts(vllm: Layered) -> None:
    await vllm.does("/sleep")
    for tags, status in (
        ("weights", "sleeping"),
        ("scheduling", "sleeping"),
        ("kv_cache", "awake"),
    ):
        told = await vllm.does(f"/wake_up?tags={tags}")
        assert told == {"status": status, "tags": [tags]}
    assert await vllm.reads("/is_paused") == {"is_paused": False}


@pytest.mark.long
async def test_a_plain_pause_is_lifted_by_waking_up(vllm: Layered) -> None:
    await vllm.does("/pause?mode=keep")
    assert await vllm.does("/wake_up") == {"status": "awake", "tags": None}


@pytest.mark.long
async def test_kv_is_released_under_a_pause(vllm: Layered) -> None:
    early = await vllm.post("/release_kv_cache_memory")
    assert (early.status_code, "completed pause" in early.text) == (409, True)
    await vllm.does("/pause?clear_cache=false")
    assert await vllm.does("/release_kv_cache_memory") == {"status": "kv_cache_released"}
    again = await vllm.post("/release_kv_cache_memory")
    assert again.status_code == 409
    assert vllm.engine.held[0].released == {ResourceKind.KV_CACHE}
    assert await vllm.does("/wake_up") == {"status": "awake", "tags": None}


async def test_what_would_do_something_else_than_it_says_is_refused(vllm: Layered) -> None:
    for path, body in (
        ("/pause", {"mode": "keep"}),
        ("/pause?mode=keep", {"mode": "wait"}),
        ("/pause", {"clear_cache": False}),
        ("/sleep", {"level": 2}),
        ("/wake_up", {"tags": ["weights"]}),
        ("/wake_up?tags=bogus", None),
        ("/wake_up?tags=weights,kv_cache", None),
        ("/start_weight_update", {"is_checkpoint_format": False}),
        ("/abort_requests", {"request_ids": "cmpl-1"}),
    ):
        assert (await vllm.post(path, body)).status_code == 400, (path, body)
    assert await vllm.operations() == []
    # What it would do anyway may be said twice, and what it does not know is of no interest.
    await vllm.does("/pause?mode=keep", {"mode": "keep", "clear_cache": True, "more": 1})
