"""Release and restore of a TensorRT-LLM engine: what is sent, what is believed, and when not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.sidecars.http import Patience
from tests.doubles.engine_http import After, Answer, Die, Hang
from tests.doubles.trtllm_http import CONTROL, MODEL, TrtllmDouble
from tests.enginekit.client import Client, pb, refused, until
from tests.sidecars.trtllm.running import trtllm_and_sidecar

pytestmark = pytest.mark.anyio

WEIGHTS, KV = pb.RESOURCE_KIND_WEIGHTS, pb.RESOURCE_KIND_KV_CACHE
BOTH = ["kv_cache", "model", "model_weights"]


async def _warnings(client: Client, request: Any) -> list[str]:
    events = await client.order(request)
    assert events[-1].HasField("completed"), events[-1]
    return [event.warning.reason for event in events if event.HasField("warning")]


async def _asked(trtllm: TrtllmDouble, tokens: int) -> asyncio.Task[int]:
    """A completion that a client sends to the engine itself, once it runs."""

    async def ask() -> int:
        body = {"model": MODEL, "prompt": "x", "max_tokens": tokens, "stream": True}
        async with httpx2.AsyncClient(timeout=None, trust_env=False) as http:
            return (await http.post(f"{trtllm.url}/v1/completions", json=body)).status_code

    task = asyncio.create_task(ask())
    await until(lambda: trtllm.memory.running or task.done())
    return task


async def test_memory_is_parked_and_comes_back_by_tags(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        profile = await client.profile()
        assert not profile.pause_modes
        assert list(profile.drain_rules) == [pb.DRAIN_RULE_WAIT]
        warned = await _warnings(client, client.release("weights", "kv_cache"))
        assert warned == ["KV_CACHE_NOT_KEPT"]
        assert trtllm.orders() == [("/release_memory", BOTH)]
        profile = await client.profile()
        assert list(profile.state.released) == [WEIGHTS, KV]
        assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
        epoch = profile.release_epoch

        assert not await _warnings(client, client.restore("weights", epoch=epoch))
        assert trtllm.orders()[-1] == ("/resume_memory", ["model", "model_weights"])
        assert trtllm.memory.parked == ["kv_cache"]
        assert await client.admission() == "paused"
        # It opens itself, and what is seen of it is told.
        warned = await _warnings(client, client.restore("kv_cache", epoch=epoch))
        assert warned == ["ADMISSION_OPENED"]

        async def opened() -> bool:
            return await client.admission() == "open"

        await until(opened)
        assert await client.generate(model=MODEL).finish_reason() == "LENGTH"


async def test_requests_that_go_to_the_engine_itself_are_waited_for(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        asked = await _asked(trtllm, 200)
        await client.completed(client.release("kv_cache", content="discard"))
        assert await asked == 200
        assert trtllm.memory.parked == ["kv_cache"]


async def test_more_cannot_be_released_while_something_is(tmp_path: Path) -> None:
    """The engine itself refuses it; nothing is sent."""
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        await client.completed(client.release("kv_cache"))
        failed = await client.failed(client.release("weights"))
        assert failed.reason == "ALREADY_RELEASED"
        again = await client.completed(client.release("kv_cache"))
        assert not again.changed
        assert len(trtllm.orders()) == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Answer(200, {"status": "success"}), "NOT_CARRIED_OUT"),  # and nothing is parked
        (Answer(200, {"status": "error"}), "NOT_CARRIED_OUT"),
        (Answer(200, None), "WRONG_ANSWER"),
        (Answer(409, {"error": {"message": "Runtime memory is already parked"}}), "ENGINE_REFUSED"),
        (Answer(401, {"error": {"message": "nonce"}}), "SIGNATURE_REFUSED"),
        (Answer(500, {"error": {"message": "worker failed"}}), "ENGINE_REFUSED"),
    ],
)
async def test_what_the_engine_does_not_do_is_a_failure(
    tmp_path: Path, fault: Answer, reason: str
) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        trtllm.next("/release_memory", fault)
        failed = await client.failed(client.release("weights"))
        assert failed.reason == reason
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert trtllm.orders() == [("/release_memory", ["model", "model_weights"])]
        assert await client.admission() == "open"
        assert await client.generate(model=MODEL).finish_reason() == "LENGTH"


async def test_an_answer_that_is_lost_is_made_good_by_looking(tmp_path: Path) -> None:
    patience = Patience(read_s=5.0, control_s=10.0, watch_s=0.1)
    async with trtllm_and_sidecar(tmp_path, patience=patience) as (trtllm, _, client):
        trtllm.next("/release_memory", After(200, None))
        failed = await client.failed(client.release("weights"))
        # It said nothing that can be understood, and had done it: that was taken back.
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert [path for path, _ in trtllm.orders()] == ["/release_memory", "/resume_memory"]
        assert trtllm.memory.state == "running"


async def test_a_drain_that_takes_too_long_is_taken_back(tmp_path: Path) -> None:
    """Nobody waits for it any more, but in the engine it goes on: it parks, and is woken."""
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        asked = await _asked(trtllm, 1500)
        failed = await client.failed(client.release("weights", deadline_ms=1500))
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert await asked == 200
        assert trtllm.memory.state == "running"
        assert await client.admission() == "open"


async def test_a_memory_that_failed_half_way_takes_the_engine_out_of_service(
    tmp_path: Path,
) -> None:
    """Until another process has taken its place, which is another instance."""
    async with trtllm_and_sidecar(tmp_path) as (trtllm, sidecar, client):
        trtllm.memory.fails = 1
        failed = await client.failed(client.release("weights", "kv_cache"))
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        state = (await client.profile()).state
        assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
        assert state.admission != pb.ADMISSION_STATE_OPEN
        sent = len(trtllm.orders())
        assert await client.health("openengine.v1.Inference") == "NOT_SERVING"
        await client.order(client.release("weights"))
        assert len(trtllm.orders()) == sent
        await trtllm.restart()
        await until(lambda: len(sidecar.lives) == 2, 30)


async def test_signed_calls_are_never_sent_again_as_they_were(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        for _ in range(2):
            await client.completed(client.release("kv_cache"))
            epoch = (await client.profile()).release_epoch
            await client.completed(client.restore("kv_cache", epoch=epoch))
        signed = [path for _, path, _, _ in trtllm.calls if path in CONTROL]
        gets = sum(
            1 for method, path, _, _ in trtllm.calls if (method, path) == ("GET", "/memory_status")
        )
        assert gets > 4
        # Each was taken: a number that had been there before would have been refused.
        assert len(trtllm.nonces) == len(signed)


async def test_what_others_park_and_wake_is_followed(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        await trtllm.memory.release(["kv_cache", "sampler"])

        async def shows(admission: str, released: list[int]) -> bool:
            state = (await client.profile()).state
            name = pb.AdmissionState.Name(state.admission)
            return name.endswith(admission) and list(state.released) == released

        await until(lambda: shows("PAUSED", [KV]))
        assert (await client.profile()).state.pause.mode == pb.PAUSE_MODE_DRAIN
        await trtllm.memory.resume(["kv_cache"])
        await until(lambda: shows("PAUSED", []))  # something of it is away all the same
        await trtllm.memory.resume(None)
        await until(lambda: shows("OPEN", []))


async def test_an_engine_that_ends_in_the_midst_of_it(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, sidecar, client):
        trtllm.next("/release_memory", Die())
        key = client.key()
        failed = await client.failed(client.release("weights", idempotency_key=key))
        assert failed.reason == "ENGINE_DIED"

        async def lost() -> bool:
            return bool((await client.profile()).state.ranks)

        await until(lost)
        instance = sidecar.instance_id
        await trtllm.restart()
        await until(lambda: len(sidecar.lives) == 2, 30)
        assert sidecar.instance_id != instance


@pytest.mark.long
async def test_an_answer_that_never_comes(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (trtllm, _, client):
        trtllm.next("/release_memory", Hang())
        failed = await client.failed(client.release("weights", deadline_ms=1_000))
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert trtllm.memory.state == "running"


async def test_no_other_order_is_offered(tmp_path: Path) -> None:
    async with trtllm_and_sidecar(tmp_path) as (_, _, client):
        for request in (client.pause("drain"), client.flush(), client.update()):
            refusal = await refused(client.stream(request))
            assert refusal.code.name == "UNIMPLEMENTED"
