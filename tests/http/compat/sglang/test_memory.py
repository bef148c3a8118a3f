"""Pauses, flushes and memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.domain.kinds import ContentPolicy, PauseMode, ResourceKind
from tests.enginekit.client import client_of
from tests.enginekit.client import until as settled
from tests.enginekit.minimal_engine import fault
from tests.http.compat.layered import Layered

pytestmark = pytest.mark.anyio

PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


async def ready(sglang: Layered) -> bool:
    return (await sglang.call("GET", "/ready")).status_code == 200


async def text(sglang: Layered, path: str, method: str = "GET") -> tuple[int, str]:
    answer = await sglang.call(method, path)
    assert "content-type" not in answer.headers
    return answer.status_code, answer.text


@pytest.mark.long
async def test_a_pause_and_its_end(sglang: Layered) -> None:
    for mode, kept in (
        ({}, PauseMode.ABORT),
        ({"mode": "in_place"}, PauseMode.KEEP),
        ({"mode": "retract", "zzz": [1]}, PauseMode.KEEP),
    ):
        for _ in range(2):
            assert await sglang.does("/pause_generation", mode) == PAUSED
        assert sglang.engine.paused is kept
        assert not await ready(sglang)
        assert (await sglang.call("GET", "/health")).status_code == 200
        for _ in range(2):
            assert await sglang.does("/continue_generation", {}) == CONTINUED
        assert await ready(sglang)
    assert await sglang.kinds() == ["pause", "resume"] * 3


@pytest.mark.long
async def test_a_body_has_to_be_there(sglang: Layered) -> None:
    for path in ("/pause_generation", "/continue_generation", "/release_memory_occupation"):
        for body in (None, b"", b"null", b"[]", b"{", b'{"mode":1,"tags":1,"torch_empty_cache":9}'):
            sent: dict[str, Any] = {} if body is None else {"content": body}
            answer = await sglang.call(
                "POST", path, headers={"content-type": "application/json"}, **sent
            )
            assert answer.status_code == 400, (path, body)
            told = answer.json()
            assert list(told) == ["object", "message", "type", "param", "code"]
            assert told["message"].startswith("1 validation error:\n  {'type': '")
    assert await sglang.operations() == []


@pytest.mark.long
async def test_another_s_pause_stays(sglang: Layered) -> None:
    await sglang.does("/pause_generation", {}, subject="bob")
    refused = await sglang.post("/continue_generation", {})
    assert refused.status_code == 400
    assert "not one of yours" in refused.json()["error"]["message"]
    await sglang.does("/continue_generation", {}, subject="bob")


@pytest.mark.long
async def test_a_flush_says_what_is_in_its_way(sglang: Layered) -> None:
    sglang.engine.stall()
    async with client_of(sglang.full.double) as direct:
        stream = direct.generate()
        await settled(lambda: sglang.engine.running)
        sglang.engine.cached_blocks = 4
        busy = await text(sglang, "/flush_cache")
        assert busy == (400, "Flush cache failed.\n")
        assert await text(sglang, "/flush_cache?timeout=0.6", "POST") == (
            400,
            "Timed out waiting for idle state.\n",
        )
        waiting = asyncio.create_task(text(sglang, "/flush_cache?timeout=60"))
        await settled(lambda: sglang.full.double.engine.orders("prepare"))
        sglang.engine.go()
        assert await stream.finish_reason() == "LENGTH"
        assert (await waiting)[0] == 200


@pytest.mark.long
async def test_memory_is_given_up_and_taken_back(sglang: Layered) -> None:
    """Not a word of a pause, there as here."""
    for _ in range(2):
        released = await sglang.post("/release_memory_occupation", {})
        assert (released.status_code, released.text) == (200, "null")
    assert sglang.engine.held[0].released == set(ResourceKind)
    assert not await ready(sglang)
    assert (await sglang.post("/continue_generation", {})).status_code == 400
    taken = await sglang.call("GET", "/resume_memory_occupation", json={"tags": ["kv_cache"]})
    assert taken.text == "null"
    for _ in range(2):
        assert await sglang.does("/resume_memory_occupation", {"tags": []}) is None
    assert await ready(sglang)
    assert await sglang.kinds() == [
        *("pause", "release_resources", "restore_resources", "restore_resources", "resume")
    ]


@pytest.mark.long
async def test_a_pause_of_the_client_s_own_outlives_its_memory(sglang: Layered) -> None:
    await sglang.does("/pause_generation", {})
    await sglang.does("/release_memory_occupation", {"tags": ["weights"]})
    await sglang.does("/resume_memory_occupation", {"tags": ["weights"]})
    assert sglang.engine.paused is PauseMode.ABORT
    await sglang.does("/continue_generation", {})
    assert await ready(sglang)


@pytest.mark.long
async def test_what_is_not_kept_is_told(sglang: Layered) -> None:
    """Each resource in the way that the engine has for it; weights that are gone do not serve."""
    keep, drop = frozenset({ContentPolicy.PRESERVE}), frozenset({ContentPolicy.DISCARD})
    sglang.engine.offered = _with(sglang, {"weights": drop, "kv_cache": drop})
    await sglang.gate.rooms.fleet.discover(sglang.engine_id)
    everything = ["weights", "kv_cache", "cuda_graph"]
    await sglang.does("/release_memory_occupation", {"tags": everything})
    await sglang.does("/resume_memory_occupation", {})
    assert not await ready(sglang)
    update = {"model_path": "/weights/new", "weight_version": "new"}
    await sglang.does("/update_weights_from_disk", update)
    assert await ready(sglang)
    sglang.engine.offered = _with(sglang, {"weights": keep, "kv_cache": drop})
    await sglang.gate.rooms.fleet.discover(sglang.engine_id)
    await sglang.does("/release_memory_occupation", {})
    await sglang.does("/resume_memory_occupation", {})
    assert await ready(sglang)
    releases = [one for one in await sglang.operations() if one["kind"] == "release_resources"]
    assert [(one["request"]["content"], one["request"]["resources"]) for one in releases] == [
        ("discard", ["weights", "kv_cache"]),
        ("preserve", ["weights"]),
        ("discard", ["kv_cache"]),
    ]
    refused = await sglang.post("/release_memory_occupation", {"tags": ["cuda_graph"]})
    assert refused.status_code == 400


@pytest.mark.long
async def test_requests_that_run_are_waited_for_and_frozen_ones_are_not_dropped(
    sglang: Layered,
) -> None:
    """Both end SGLang."""
    sglang.engine.stall()
    async with client_of(sglang.full.double) as direct:
        stream = direct.generate()
        await settled(lambda: sglang.engine.running)
        releasing = asyncio.create_task(sglang.post("/release_memory_occupation", {}))
        await settled(sglang.kinds)
        assert sglang.engine.held[0].released == frozenset()
        sglang.engine.go()
        assert await stream.finish_reason() == "LENGTH"
        assert (await releasing).text == "null"


@pytest.mark.long
async def test_a_release_that_fails_leaves_the_engine_open(sglang: Layered) -> None:
    async def fails(order: Any, rank: int) -> None:
        if order.command.kind == "release_resources":
            await fault(order, rank)

    sglang.engine.script("prepare", fails)
    refused = await sglang.post("/release_memory_occupation", {})
    assert refused.status_code == 400
    assert list(refused.json()) == ["error"]
    assert await ready(sglang)
    assert await sglang.kinds() == ["pause", "release_resources", "resume"]


def _with(sglang: Layered, resources: dict[str, frozenset[ContentPolicy]]) -> Any:
    found = {ResourceKind(name): ways for name, ways in resources.items()}
    return replace(sglang.engine.offered, resources=found)
