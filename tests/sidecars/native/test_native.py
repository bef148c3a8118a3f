"""A sidecar in front of an engine that speaks `openengine.v1` itself and asks for no token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.conformance.case import Verdict
from app.conformance.connection import Listener
from app.conformance.trial import Options
from app.rpc.openengine.v1 import generation_pb2, openengine_pb2_grpc
from app.rpc.openengine.v1.lifecycle_pb2 import (
    ABORT_STATUS_UNSPECIFIED,
    AbortRequest,
    AllRequests,
)
from app.sidecars.native.dialect import NativeDialect
from app.sidecars.serving import CannotServe
from tests.conformance.judging import failures, ids_of, judged
from tests.doubles.core_engine import C, CoreEngine, H, Lost, Refuse, running_core_engine
from tests.enginekit.client import Client, pb, until
from tests.sidecars.sidecar import Sidecar, administered

pytestmark = pytest.mark.anyio

MODEL = "tiny"


class Place:
    """Where the double is, as a sidecar is told."""

    def __init__(self, engine: CoreEngine) -> None:
        self.url = f"grpc://{engine.address}"


@asynccontextmanager
async def engine_and_sidecar(
    tmp_path: Path, *, only_way: bool = False, token_s: float = 0.002
) -> AsyncIterator[tuple[CoreEngine, Sidecar, Client]]:
    dialect = NativeDialect(name="trtllm", only_way=only_way)
    async with running_core_engine(loras=False, token_s=token_s) as engine:
        place: Any = Place(engine)
        async with administered(place, tmp_path / "d", dialect=dialect) as (
            sidecar,
            client,
        ):
            yield engine, sidecar, client


@asynccontextmanager
async def past_it(engine: CoreEngine, request_id: str) -> AsyncIterator[Any]:
    """A request that goes to the engine itself, under way."""
    async with grpc.aio.insecure_channel(engine.address) as channel:
        request = generation_pb2.GenerateRequest(request_id=request_id, model=MODEL, prompt="x")
        request.stopping.max_tokens = 100_000
        call = openengine_pb2_grpc.InferenceStub(channel).Generate(request)
        await call.read()
        yield call
        call.cancel()


def _offered(profile: pb.AdminProfile) -> set[str]:
    names = (pb.AdminOperationKind.Name(one.kind) for one in profile.operations)
    return {name.removeprefix("ADMIN_OPERATION_KIND_").lower() for name in names}


async def test_it_says_what_the_engine_says(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (_, sidecar, client):
        profile = await client.profile()
        assert _offered(profile) == {"abort_requests"}
        assert (profile.world_size, list(profile.models)) == (2, [MODEL])
        assert profile.state.admission == pb.ADMISSION_STATE_OPEN
        assert sidecar.lives[-1].found.version == "1.3.0"
        running = client.generate(model=MODEL, stopping={"max_tokens": 5})
        assert await running.finish_reason() == "LENGTH"
        assert running.text == "xxxxx"
        assert (await client.load()).running_requests == 0


async def test_requests_are_ended_wherever_they_came_in(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (engine, _, client):
        running = client.generate(model=MODEL, request_id="r-1", stopping={"max_tokens": 100_000})
        await running.first()
        async with past_it(engine, "r-2") as other:
            assert (await client.load()).running_requests == 2
            for name in ("r-1", "r-2"):
                await client.control.Abort(AbortRequest(request_id=name))
            assert await running.finish_reason() == "CANCELLED"
            end = await other.read()
            while not end.HasField("finished"):
                end = await other.read()
            assert end.finished.reason == generation_pb2.FINISH_REASON_CANCELLED
        async with past_it(engine, "r-3"):
            running = client.generate(model=MODEL, stopping={"max_tokens": 100_000})
            await running.first()
            await client.control.Abort(AbortRequest(all_requests=AllRequests()))
            assert await running.finish_reason() == "CANCELLED"
            await until(lambda: not engine.running)


async def test_what_the_engine_does_not_take_is_ended_by_hanging_up(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (engine, _, client):
        running = client.generate(model=MODEL, request_id="r-1", stopping={"max_tokens": 100_000})
        await running.first()
        engine.next("Abort", Refuse(C.INTERNAL))
        await client.control.Abort(AbortRequest(request_id="r-1"))
        assert await running.finish_reason() == "CANCELLED"
        await until(lambda: not engine.running)


async def test_an_abort_whose_answer_is_lost_is_not_made_again(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (engine, _, client):
        async with past_it(engine, "r-2"):
            engine.next("Abort", Lost())
            answer = await client.control.Abort(AbortRequest(request_id="r-2"))
            assert answer.status == ABORT_STATUS_UNSPECIFIED
            await until(lambda: not engine.running)
        assert len(engine.sent("Abort")) == 1


async def test_pauses_are_the_gate_where_it_is_the_only_way(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path, only_way=True) as (engine, _, client):
        running = client.generate(model=MODEL, stopping={"max_tokens": 20})
        await running.first()
        paused = await client.completed(client.pause("drain"))
        assert paused.pause.requests_finished == 1
        held = client.generate(model=MODEL)
        await client.held(1)
        assert not engine.running
        await client.completed(client.resume((await client.profile()).pause_epoch))
        assert await held.finish_reason() == "LENGTH"
        running = client.generate(model=MODEL, stopping={"max_tokens": 100_000})
        await running.first()
        paused = await client.completed(client.pause("abort"))
        assert paused.pause.requests_aborted == 1
        assert await running.finish_reason() == "CANCELLED"


async def test_an_engine_that_drains_is_followed(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (engine, _, client):
        for health, admission in (
            (H.HEALTH_STATE_DRAINING, "paused"),
            (H.HEALTH_STATE_READY, "open"),
        ):
            engine.health = health

            async def shows(wanted: str = admission) -> bool:
                return await client.admission() == wanted

            await until(shows)


async def test_another_process_is_another_instance(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path) as (engine, sidecar, client):
        instance = sidecar.instance_id
        engine.health = H.HEALTH_STATE_NOT_READY

        async def lost() -> bool:
            return bool((await client.profile()).state.ranks)

        await until(lost)
        engine.health = H.HEALTH_STATE_READY
        await engine.restart()
        await until(lambda: len(sidecar.lives) == 2, 30)
        assert sidecar.instance_id != instance


@pytest.mark.parametrize("why", ["admin", "nameless"])
async def test_who_needs_no_sidecar_or_cannot_be_told_is_turned_away(
    tmp_path: Path, why: str
) -> None:
    async with running_core_engine() as engine:
        if why == "admin":
            engine.extra = {"openengine_admin": True}
        else:
            engine.instance_id = ""
        place: Any = Place(engine)
        with pytest.raises(CannotServe):
            await Sidecar(place, tmp_path / "d", dialect=NativeDialect(name="trtllm")).start()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_it_conforms_where_it_is_the_only_way(tmp_path: Path) -> None:
    async with engine_and_sidecar(tmp_path, only_way=True, token_s=0.004) as (_, sidecar, _client):
        report = await judged(
            Options(
                admin=Listener(address=sidecar.admin_address),
                inference=Listener(address=sidecar.inference_address),
                destructive=True,
                patience_s=30.0,
            )
        )
    assert not failures(report)
    assert {"pause.each-mode", "abort.one", "abort.all"} <= ids_of(report, Verdict.PASS)
