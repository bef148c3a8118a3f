"""What is offered of which TensorRT-LLM server, and whom a sidecar turns away from."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.rpc.openengine.v1.lifecycle_pb2 import AbortRequest, AllRequests
from app.sidecars.serving import CannotServe
from app.sidecars.trtllm.signing import Scheme
from tests.doubles.engine_http import Answer
from tests.doubles.trtllm_http import MODEL, running_trtllm
from tests.enginekit.client import Client, client_of, pb, refused, until
from tests.sidecars.sidecar import Sidecar, administered
from tests.sidecars.trtllm.running import dialect, trtllm_and_sidecar

pytestmark = pytest.mark.anyio


async def _offered(client: Client) -> set[str]:
    found = (await client.profile()).operations
    names = (pb.AdminOperationKind.Name(one.kind) for one in found)
    return {name.removeprefix("ADMIN_OPERATION_KIND_").lower() for name in names}


MEMORY = {"release_resources", "restore_resources"}


async def test_it_is_what_the_server_says(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (_, sidecar, client):
        assert await _offered(client) == {"abort_requests", *MEMORY}
        found = sidecar.lives[-1].found
        assert (found.version, found.models) == ("1.3.0rc1", (MODEL,))
        profile = await client.profile()
        assert [
            (pb.ResourceKind.Name(one.kind), len(one.content)) for one in profile.resources
        ] == [("RESOURCE_KIND_WEIGHTS", 1), ("RESOURCE_KIND_KV_CACHE", 2)]


@pytest.mark.parametrize(
    ("double", "key"),
    [({"sleep_mode": False}, "a-key-of-enough-characters"), ({}, None), ({"scheme": None}, None)],
)
async def test_memory_is_left_alone_where_it_is_not_told_or_there_is_no_key(
    tmp_path: Path, double: dict[str, object], key: str | None
) -> None:
    async with (
        running_trtllm(**double) as trtllm,
        administered(trtllm, tmp_path / "d", dialect=dialect(key=key)) as (_, client),
    ):
        assert await _offered(client) == {"abort_requests"}
        assert await client.admission() == "open"
        assert await client.generate(model=MODEL).finish_reason() == "LENGTH"
        assert not trtllm.orders()


async def test_a_server_from_before_is_left_alone_also_with_a_key(tmp_path: Path) -> None:
    """What it would do there could not be seen."""
    async with (
        running_trtllm(scheme=None) as trtllm,
        administered(trtllm, tmp_path / "d", dialect=dialect()) as (_, client),
    ):
        assert await _offered(client) == {"abort_requests"}
        assert not trtllm.orders()


async def test_the_scheme_that_the_documentation_shows(tmp_path: Path) -> None:
    async with (
        running_trtllm(scheme="body") as trtllm,
        administered(trtllm, tmp_path / "d", dialect=dialect(scheme=Scheme.BODY)) as (_, client),
    ):
        await client.completed(client.release("kv_cache"))
        assert trtllm.memory.parked == ["kv_cache"]


@pytest.mark.parametrize(
    "double",
    [{"key": "another-key-of-enough-characters"}, {"scheme": "body"}, {"skew_s": 400}],
)
async def test_a_signature_that_is_not_taken_is_said_at_the_start(
    tmp_path: Path, double: dict[str, object]
) -> None:
    async with running_trtllm(**double) as trtllm:
        with pytest.raises(CannotServe, match="signature"):
            await Sidecar(trtllm, tmp_path / "d", dialect=dialect()).start()
        assert not trtllm.orders()


async def test_a_server_that_takes_no_more_numbers_is_not_known_to_be_well(tmp_path: Path) -> None:
    """It refuses every signed call until earlier ones are forgotten; nothing was done meanwhile."""
    async with trtllm_and_sidecar(tmp_path, look_s=3600.0) as (trtllm, _, client):
        trtllm.options["most_nonces"] = 0
        trtllm.nonces.clear()
        failed = await client.failed(client.release("weights"))
        assert failed.reason == "SIGNATURE_REFUSED"
        assert not trtllm.memory.parked
        trtllm.options["most_nonces"] = 4096
        await client.completed(client.release("weights"))


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/version", Answer(200, {})),
        ("/v1/models", Answer(200, {"data": []})),
        ("/memory_status", Answer(200, {"state": "asleep", "parked_tags": []})),
        ("/memory_status", Answer(200, {"state": "parked", "parked_tags": []})),
        ("/memory_status", Answer(200, {"state": "running", "parked_tags": ["model"]})),
        ("/memory_status", Answer(200, None)),
    ],
)
async def test_what_is_no_such_server_is_not_taken_for_one(
    tmp_path: Path, path: str, answer: Answer
) -> None:
    async with running_trtllm() as trtllm:
        trtllm.next(path, answer)
        with pytest.raises(CannotServe, match="no TensorRT-LLM server"):
            await Sidecar(trtllm, tmp_path / "d", dialect=dialect()).start()


async def test_requests_of_its_own_are_ended_and_counted(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        running = client.generate(model=MODEL, request_id="r-1", stopping={"max_tokens": 100_000})
        await running.first()
        assert (await client.load()).running_requests == 1
        gone = await refused(client.control.Abort(AbortRequest(request_id="nobody")))
        assert gone.reason == "REQUEST_NOT_FOUND"
        await client.control.Abort(AbortRequest(request_id="r-1"))
        assert await running.finish_reason() == "CANCELLED"
        await until(lambda: trtllm.aborted == 1)


async def test_all_are_ended_only_where_nobody_else_has_any(tmp_path: Path) -> None:
    every = AbortRequest(all_requests=AllRequests())
    async with trtllm_and_sidecar(tmp_path / "a") as (_, _, client):
        assert (await refused(client.control.Abort(every))).code.name == "UNIMPLEMENTED"
    async with trtllm_and_sidecar(tmp_path / "b", only_way=True) as (_, _, client):
        running = client.generate(model=MODEL, stopping={"max_tokens": 100_000})
        await running.first()
        await client.control.Abort(every)
        assert await running.finish_reason() == "CANCELLED"


async def test_pauses_are_offered_where_the_sidecar_is_the_only_way(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path, only_way=True) as (trtllm, _, client):
        assert await _offered(client) == {"abort_requests", "pause", "resume", *MEMORY}
        running = client.generate(model=MODEL, stopping={"max_tokens": 500})
        await running.first()
        paused = await client.completed(client.pause("drain"))
        assert paused.pause.requests_finished == 1
        held = client.generate(model=MODEL)
        await client.held(1)
        assert not trtllm.memory.running
        await client.completed(client.resume((await client.profile()).pause_epoch))
        assert await held.finish_reason() == "LENGTH"

        running = client.generate(model=MODEL, stopping={"max_tokens": 100_000})
        await running.first()
        warned = await client.order(client.release("weights", "kv_cache", drain="abort"))
        assert warned[-1].HasField("completed")
        assert await running.finish_reason() == "CANCELLED"
        profile = await client.profile()
        await client.completed(client.restore("weights", "kv_cache", epoch=profile.release_epoch))
        assert trtllm.memory.state == "running"
        # A restore never opens: this one's gate is all there is.
        assert await client.admission() == "paused"
        await client.completed(client.resume(profile.pause_epoch))
        assert await client.generate(model=MODEL).finish_reason() == "LENGTH"


async def test_what_is_released_stays_so_over_a_restart_of_the_sidecar(tmp_path: Path) -> None:
    async with running_trtllm() as trtllm:
        for restarted in (False, True):
            async with administered(trtllm, tmp_path / "d", dialect=dialect(only_way=True)) as (
                _,
                client,
            ):
                if not restarted:
                    await client.completed(client.release("weights"))
                    continue
                profile = await client.profile()
                assert list(profile.state.released) == [pb.RESOURCE_KIND_WEIGHTS]
                assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
                await client.completed(client.restore("weights", epoch=profile.release_epoch))
                assert await client.admission() == "paused"
                await client.completed(client.resume(profile.pause_epoch))


async def test_an_engine_that_went_away_and_came_back_is_another_instance(tmp_path: Path) -> None:
    """It has no identity of its own to show."""
    async with trtllm_and_sidecar(tmp_path) as (trtllm, sidecar, client):
        await client.completed(client.release("kv_cache"))
        await trtllm.stop()

        async def lost() -> bool:
            return bool((await client.profile()).state.ranks)

        await until(lost)
        await trtllm.restart()
        await until(lambda: len(sidecar.lives) == 2, 30)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/version", Answer(503, None)),
        pytest.param("/memory_status", Answer(502, None), marks=pytest.mark.long),
        pytest.param("/health", Answer(503, None), marks=pytest.mark.long),
    ],
)
async def test_what_answers_for_an_engine_that_starts_is_waited_out(
    tmp_path: Path, path: str, answer: Answer
) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, sidecar, client):
        await trtllm.stop()

        async def lost() -> bool:
            return bool((await client.profile()).state.ranks)

        await until(lost)
        trtllm.next(path, answer, answer)
        await trtllm.restart()
        await until(lambda: len(sidecar.lives) == 2, 30)


@pytest.mark.long
async def test_a_release_that_its_sidecar_did_not_live_to_see(tmp_path: Path) -> None:
    """It goes on in the engine. The next sidecar says of the order what it can, and of the engine
    what is there."""
    async with running_trtllm() as trtllm:
        sidecar = Sidecar(trtllm, tmp_path / "d", dialect=dialect())
        await sidecar.start()
        trtllm.memory.began()  # a request of somebody else
        async with client_of(sidecar) as client:
            key = client.key()
            releasing = client.stream(client.release("weights", idempotency_key=key))
            await until(lambda: trtllm.memory.state == "parking")
        await sidecar.stop()
        releasing.cancel()
        async with administered(trtllm, tmp_path / "d", dialect=dialect()) as (_, client):
            ended = await client.operation(idempotency_key=key)
            assert ended.failed.reason == "ENGINE_RESTARTED"
            assert ended.failed.effect == pb.FAILURE_EFFECT_UNKNOWN
            failed = await client.failed(client.release("kv_cache"))
            assert failed.reason == "MEMORY_MOVING"
            trtllm.memory.ended()

            async def released() -> bool:
                return list((await client.profile()).state.released) == [pb.RESOURCE_KIND_WEIGHTS]

            await until(released)
            assert await client.admission() == "paused"
        assert len(trtllm.orders()) == 1
