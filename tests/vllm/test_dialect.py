"""Dialect `vllm` of the gateway against the genuine `vllm.Control`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from app.rpc.vllm import control_pb2 as pb
from app.rpc.vllm.control_pb2_grpc import ControlStub
from tests.e2e.driving import Gateway
from tests.real.asking import streaming
from tests.real.gateway import ENGINE, gateway, register
from tests.real.servers import Server

pytestmark = pytest.mark.anyio

PATH = f"/v1/engines/{ENGINE}"


@pytest.fixture(scope="module")
async def bridge(
    rust_engine: Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway")) as serving:
        async with serving.client:
            await register(serving, rust_engine.control, "vllm")
            yield serving


async def state(bridge: Gateway) -> dict[str, Any]:
    """The engine as the gateway sees it now: an info round trip refreshes the facts."""
    await bridge.get(f"{PATH}/info")
    return dict((await bridge.get(PATH))["facts"])


async def resume(bridge: Gateway) -> None:
    facts = await state(bridge)
    await bridge.does(ENGINE, "resume", {"pause_epoch": facts["pause"]["epoch"]})


async def is_paused(server: Server) -> bool:
    """By the engine's own word, past the gateway."""
    async with grpc.aio.insecure_channel(server.control) as channel:
        return (await ControlStub(channel).IsPaused(pb.IsPausedRequest(), timeout=10)).paused


async def failed(bridge: Gateway, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    ended = await bridge.ended((await bridge.accepted(ENGINE, verb, body))["id"])
    assert ended["state"] == "failed", ended
    return dict(ended["error"])


async def test_what_is_known_of_it(bridge: Gateway) -> None:
    engine = await bridge.get(PATH)
    assert engine["revision_source"] == "gateway"
    assert engine["facts"]["admission"] == "open"
    assert engine["facts"]["weights"]["version"] == "default"
    can = await bridge.get(f"{PATH}/capabilities")
    assert "pause" in can["operations"]
    # Not with --enable-sleep-mode, which a CPU is refused.
    assert "release_resources" not in can["operations"]
    assert "flush_caches" not in can["operations"]


async def test_frozen_and_going_on(bridge: Gateway, rust_engine: Server) -> None:
    with streaming(rust_engine) as stream:
        paused = await bridge.does(ENGINE, "pause", {"mode": "keep"})
        assert paused["result"]["changed"] is True
        assert paused["verification"] == "verified"
        assert await is_paused(rust_engine)
        assert not stream.ended.is_set()
        # Asked for a drain now, vLLM would say at once that it has drained what is frozen.
        refused = await failed(bridge, "pause", {"mode": "drain"})
        assert refused["reason"] == "REQUESTS_FROZEN"
        assert not stream.ended.is_set()
        await resume(bridge)
    assert (stream.finish, stream.error) == ("length", None)
    assert not await is_paused(rust_engine)


async def test_a_drain_and_nobody_gets_in_between(bridge: Gateway, rust_engine: Server) -> None:
    """On vLLM's HTTP a resume succeeds beside a pause that waits, and that pause then says it has
    paused an engine that runs."""
    with streaming(rust_engine) as stream:
        drain = await bridge.accepted(ENGINE, "pause", {"mode": "drain"})
        answer = await bridge.order(ENGINE, "resume", {"pause_epoch": 1})
        assert answer.status_code == 409, answer.text
        ended = await bridge.ended(drain["id"])
        assert ended["state"] == "succeeded", ended
        assert stream.ended.wait(60)
    assert stream.finish == "length"
    assert await is_paused(rust_engine)
    await resume(bridge)


async def test_ended_by_a_pause(bridge: Gateway, rust_engine: Server) -> None:
    with streaming(rust_engine) as stream:
        await bridge.does(ENGINE, "pause", {"mode": "abort"})
        assert stream.ended.wait(60)
        assert stream.finish == "abort"
    await resume(bridge)


async def test_one_request_is_aborted(bridge: Gateway, rust_engine: Server) -> None:
    with (
        streaming(rust_engine, request_id="one") as one,
        streaming(rust_engine, request_id="two", max_tokens=900) as two,
    ):
        ended = await bridge.does(ENGINE, "abort-requests", {"request_ids": ["chatcmpl-one"]})
        assert ended["verification"] == "unverified"
        assert one.ended.wait(60)
        assert one.finish == "abort"
        assert two.ended.wait(60)
    assert two.finish == "length"
    refused = await bridge.order(ENGINE, "abort-requests", {"all": True})
    assert refused.status_code == 501


async def test_a_label_is_set_and_read_back(bridge: Gateway) -> None:
    ended = await bridge.does(ENGINE, "weight-version", {"weight_version": "v8"})
    assert ended["verification"] == "verified"
    assert (await bridge.get(f"{PATH}/weight-version"))["version"] == "v8"


async def test_another_client_is_noticed(bridge: Gateway, rust_engine: Server) -> None:
    before = (await bridge.get(PATH))["revision"]
    async with grpc.aio.insecure_channel(rust_engine.control) as channel:
        request = pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP)
        await ControlStub(channel).PauseGeneration(request, timeout=30)
    seen = await bridge.until(PATH, lambda engine: engine["facts"]["admission"] == "paused")
    assert seen["facts"]["pause"]["by"] == "external"
    assert seen["revision"] > before
    await resume(bridge)
    assert not await is_paused(rust_engine)


async def taken_by(rust_engine: Server) -> None:
    """Until the engine has the pause: of one that had not reached it, nothing would be lost."""
    async with asyncio.timeout(30):
        while not await is_paused(rust_engine):  # noqa: ASYNC110 - vLLM tells nobody
            await asyncio.sleep(0.05)


async def test_the_engine_is_killed_under_an_order(bridge: Gateway, rust_engine: Server) -> None:
    """Last: vLLM has no way back from here. A call that is in flight when its engine dies is never
    answered; the order ends, and not as a success."""
    with streaming(rust_engine):
        drain = await bridge.accepted(ENGINE, "pause", {"mode": "drain"})
        await taken_by(rust_engine)
        os.kill(rust_engine.engine_core(), signal.SIGKILL)
        ended = await bridge.until(
            f"/v1/operations/{drain['id']}",
            lambda found: found["done"] or found["state"] == "reconciling",
        )
        assert ended["state"] in ("failed", "reconciling"), ended
        if ended["done"]:
            assert ended["error"]["effect"] != "none", ended
    seen = await bridge.until(PATH, lambda engine: engine["health"]["state"] == "unreachable")
    assert seen["id"] == ENGINE
