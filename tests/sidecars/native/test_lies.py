"""An engine that grows, starts slowly, breaks off or does not take what it is sent, and a caller
who does not listen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.rpc.openengine.v1 import generation_pb2, openengine_pb2_grpc
from app.rpc.openengine.v1.lifecycle_pb2 import AbortRequest, AllRequests
from app.sidecars.native.dialect import NativeDialect
from tests.doubles.core_engine import C, H, Refuse, running_core_engine
from tests.enginekit.client import client_of, refused, until
from tests.sidecars.native.test_native import MODEL, Place, engine_and_sidecar
from tests.sidecars.sidecar import Sidecar

pytestmark = pytest.mark.anyio


async def test_an_engine_that_still_starts_is_waited_for(tmp_path: Path) -> None:
    async with running_core_engine(loras=False) as engine:
        engine.health = H.HEALTH_STATE_STARTING
        place: Any = Place(engine)
        sidecar = Sidecar(place, tmp_path / "d", dialect=NativeDialect(name="trtllm"))
        starting = asyncio.create_task(sidecar.start())
        await until(lambda: len(engine.sent("Health")) > 2 or starting.done())
        assert not starting.done()
        engine.health = H.HEALTH_STATE_READY
        await starting
        await sidecar.stop()


@pytest.mark.long
async def test_one_that_grows_is_taken_as_it_is_then(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (engine, sidecar, client):
        assert (await client.profile()).world_size == 2
        engine.data_parallel_size = 3
        await until(lambda: len(sidecar.lives) == 2, 30)
        async with client_of(sidecar) as again:
            assert (await again.profile()).world_size == 6


@pytest.mark.long
async def test_who_does_not_listen_holds_no_pause_up(tmp_path: Path) -> None:
    """The engine has ended the request; its caller hears of it when it reads on."""
    async with engine_and_sidecar(tmp_path, only_way=True, token_s=0) as (engine, sidecar, client):
        engine.text = "x" * 50_000
        async with grpc.aio.insecure_channel(sidecar.inference_address) as channel:
            request = generation_pb2.GenerateRequest(request_id="r", model=MODEL, prompt="x")
            request.stopping.max_tokens = 100_000
            call: Any = openengine_pb2_grpc.InferenceStub(channel).Generate(request)
            await call.read()
            seen = 0

            async def stuck() -> bool:
                nonlocal seen
                before, seen = seen, engine.made
                await asyncio.sleep(0.1)
                return before == engine.made

            await until(stuck)
            paused = await client.completed(client.pause("abort", deadline_ms=25_000))
            assert paused.pause.requests_aborted == 1
            await until(lambda: not engine.running)
            last = await call.read()
            while not last.HasField("finished"):
                last = await call.read()
            assert last.finished.reason == generation_pb2.FINISH_REASON_CANCELLED


async def test_a_request_that_breaks_off_was_not_refused(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (engine, _, client):
        running = client.generate(model=MODEL, stopping={"max_tokens": 100_000})
        await running.first()
        await engine.stop()
        end = await running.end()
        assert (end.error.message, end.error.retryable) == (
            "the connection to the engine broke",
            True,
        )


async def test_requests_that_the_engine_does_not_end_come_to_their_own(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (engine, _, client):
        running = client.generate(model=MODEL, stopping={"max_tokens": 100_000})
        await running.first()
        engine.next("Abort", Refuse(C.UNIMPLEMENTED))
        every = AbortRequest(all_requests=AllRequests())
        assert (await refused(client.control.Abort(every))).reason == "ENGINE_REFUSED"
        await engine.stop()
        assert (await running.end()).error.message == "the connection to the engine broke"
