"""Orders in SGLang's own words, and its answers taken for what they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.rpc.openengine.v1 import lifecycle_pb2, server_pb2
from app.sidecars.serving import CannotServe
from tests.doubles.engine_http import After, Answer
from tests.doubles.sglang_replies import ranks_of
from tests.enginekit.client import client_of, pb, refused, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sglang.running import Served, asked, served

pytestmark = pytest.mark.anyio

UPDATE = "/update_weights_from_disk"


def modes(it: Served) -> list[str]:
    return [body["mode"] for body in it.sglang.bodies("/pause_generation")]


async def warnings_of(it: Served, request: Any) -> list[str]:
    events = await it.client.order(request)
    assert events[-1].HasField("completed"), events[-1]
    return [event.warning.reason for event in events if event.HasField("warning")]


# ---- flush ----


async def test_a_busy_cache_is_emptied_when_it_is_free(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        request = await asked(it.sglang, "a")
        flushing = await it.client.begin(it.client.flush())
        await until(lambda: len(it.sglang.orders("/flush_cache")) >= 2)
        it.model.abort("a")
        assert (await flushing.end()).HasField("completed")
        assert await request == "abort"


async def test_a_cache_that_stays_busy(tmp_path: Path) -> None:
    """To the deadline, with what it waited for; and never under a pause that freezes."""
    async with served(tmp_path) as it:
        request = await asked(it.sglang, "a")
        failed = await it.client.failed(it.client.flush(deadline_ms=2_000))
        assert (failed.reason, failed.retryable) == ("CACHE_IN_USE", True)
        assert "1 run, 0 wait" in failed.message
        tries = len(it.sglang.orders("/flush_cache"))
        assert 2 <= tries < 10
        await it.client.completed(it.client.pause("keep"))
        assert (await it.client.failed(it.client.flush())).reason == "CACHE_IN_USE"
        assert len(it.sglang.orders("/flush_cache")) == tries + 1
        await it.client.completed(it.client.pause("abort"))
        assert await request == "abort"
        await it.client.completed(it.client.flush())


async def test_what_the_first_rank_alone_has_said(tmp_path: Path) -> None:
    async with served(tmp_path, model={"dp": 2}) as it:
        order = it.client.flush()
        assert await warnings_of(it, order) == ["FIRST_RANK_ALONE", "NOT_VERIFIED"]
        completed = await it.client.completed(order)
        assert completed.verification == pb.VERIFICATION_UNVERIFIED
        # Messages of ranks come joined, and counts as a list.
        update = await it.client.completed(it.client.update("v2", pause="abort", disk=it.disk))
        assert len(update.update_weights.evidence) == 2
        partly = {"success": True, "message": "", "ranks": ranks_of(it.model)[:1]}
        it.sglang.next("/weights_checker", Answer(200, partly), Answer(200, partly))
        once_more = it.client.update("v3", pause="abort", disk=it.disk)
        assert "NOT_VERIFIED" in await warnings_of(it, once_more)
        profile = await it.client.profile()
        assert list(profile.weight_sources) == [pb.WEIGHT_SOURCE_KIND_DISK]
        assert not profile.weight_sessions


# ---- pauses ----


async def test_modes_of_pauses(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        for mode, own in (("keep", "in_place"), ("drain", "retract"), ("abort", "abort")):
            done = await it.client.completed(it.client.pause(mode))
            assert modes(it)[-1] == own
            await it.client.completed(it.client.resume(done.pause.pause_epoch))
            assert await it.generates()


@pytest.mark.long
async def test_a_drain_waits_and_ends_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        request = await asked(it.sglang, "a", tokens=150)
        await it.client.completed(it.client.pause("drain"))
        assert await request == "length"
        assert modes(it) == ["retract"]


async def test_what_is_frozen_is_ended_by_another_pause(tmp_path: Path) -> None:
    """In place it would end with its next step alone, for which the server would wait."""
    async with served(tmp_path) as it:
        request = await asked(it.sglang, "a")
        await it.client.completed(it.client.pause("keep"))
        failed = await it.client.failed(it.client.pause("drain"))
        assert failed.reason == "REQUESTS_FROZEN"
        done = await it.client.completed(it.client.pause("abort"))
        assert done.pause.requests_aborted == 1
        assert modes(it) == ["in_place", "retract", "abort"]
        assert await request == "abort"


async def test_a_probe_under_a_pause_does_no_lasting_harm(tmp_path: Path) -> None:
    """It fails, and from then on the server calls itself not ready, paused or not."""
    async with served(tmp_path) as it, httpx2.AsyncClient(trust_env=False) as http:
        await it.client.completed(it.client.pause("keep"))
        assert (await http.get(f"{it.sglang.url}/health")).status_code == 503
        looks = [path for _, path, _, _ in it.sglang.calls].count("/health")
        assert not (await it.client.profile()).state.ranks
        assert await it.client.health("") == "SERVING"
        await it.client.completed(it.client.resume((await it.client.profile()).pause_epoch))
        assert (await http.get(f"{it.sglang.url}/ready")).status_code == 200
        assert [path for _, path, _, _ in it.sglang.calls].count("/health") == looks + 1
        assert await it.client.admission() == "open"


async def test_pauses_by_others_are_followed(tmp_path: Path) -> None:
    async with served(tmp_path) as it, httpx2.AsyncClient(trust_env=False) as http:

        async def admission() -> str:
            return await it.client.admission()

        async def reached(wanted: str) -> None:
            async def holds() -> bool:
                return await admission() == wanted

            await until(holds)

        await http.post(f"{it.sglang.url}/pause_generation", json={"mode": "in_place"})
        await reached("paused")
        assert (await it.client.profile()).state.pause.mode == pb.PAUSE_MODE_KEEP
        await http.post(f"{it.sglang.url}/continue_generation", json={})
        await reached("open")
        assert await it.generates()


@pytest.mark.long
async def test_a_pause_that_is_not_seen_is_none(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        it.sglang.next("/pause_generation", Answer(200, {"message": "ok", "status": "ok"}))
        failed = await it.client.failed(it.client.pause("abort"))
        assert failed.reason == "PAUSE_NOT_SEEN"
        assert await it.client.admission() == "open"


# ---- weights ----


async def test_an_update_and_what_proves_it(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        order = it.client.update("v2", pause="abort", disk=it.disk)
        completed = await it.client.completed(order)
        assert completed.verification == pb.VERIFICATION_VERIFIED
        assert it.sglang.bodies(UPDATE) == [
            {
                "model_path": it.disk.path,
                "weight_version": "v2",
                "flush_cache": True,
                "abort_all_requests": False,
            }
        ]
        # The server calls its model by the path now; here it keeps its name, over restarts too.
        assert it.model.served_name == it.disk.path
        assert list((await it.client.profile()).models) == ["tiny"]
        assert await it.generates()
        again = it.client.update("v3", pause="abort", disk=it.disk)
        assert await warnings_of(it, again) == ["CHECKSUMS_UNCHANGED"]


@pytest.mark.long
async def test_success_that_is_a_lie(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        it.model.lie_of_success = True
        order = it.client.update("v2", pause="abort", disk=it.disk)
        assert await warnings_of(it, order) == ["CHECKSUMS_UNCHANGED"]


@pytest.mark.parametrize(
    "answer",
    [
        {"success": False, "message": "no", "num_paused_requests": 0},
        pytest.param({"success": True}, marks=pytest.mark.long),
        pytest.param(None, marks=pytest.mark.long),
        pytest.param("nonsense", marks=pytest.mark.long),
    ],
)
async def test_status_200_is_no_success(tmp_path: Path, answer: Any) -> None:
    async with served(tmp_path) as it:
        it.sglang.next(UPDATE, Answer(200, answer))
        failed = await it.client.failed(it.client.update("v2", pause="abort", disk=it.disk))
        assert failed.reason == "WRONG_ANSWER"
        state = (await it.client.profile()).state
        assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
        profile = await it.client.profile()
        assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
        refusal = await refused(it.client.stream(it.client.resume(profile.pause_epoch)))
        assert refusal.reason == "WEIGHTS_NOT_VALID"
        await it.client.completed(it.client.update("v3", disk=it.disk))
        await it.client.completed(it.client.resume((await it.client.profile()).pause_epoch))
        assert await it.generates()


@pytest.mark.long
async def test_a_refusal_before_anything_was_touched(tmp_path: Path) -> None:
    said = {
        "success": False,
        "message": f"Failed to get weights iterator: nothing at {tmp_path}/x.",
        "num_paused_requests": 0,
    }
    async with served(tmp_path) as it:
        it.sglang.next(UPDATE, Answer(400, said))
        failed = await it.client.failed(it.client.update("v2", pause="abort", disk=it.disk))
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert str(tmp_path) not in failed.message
        assert await it.client.admission() == "open"


@pytest.mark.long
async def test_weights_that_were_changed_though_the_answer_says_no(tmp_path: Path) -> None:
    said = {"success": False, "message": "Weights were updated, but the cache was not flushed"}
    async with served(tmp_path) as it:
        it.sglang.next(UPDATE, After(400, said))
        failed = await it.client.failed(it.client.update("v2", pause="abort", disk=it.disk))
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART


async def test_what_is_frozen_goes_on_with_new_weights(tmp_path: Path) -> None:
    """Kept in place, what the old ones computed would stay, and the update would fail after it."""
    async with served(tmp_path) as it:
        request = await asked(it.sglang, "a")
        await it.client.completed(it.client.pause("keep"))
        await it.client.completed(it.client.update("v2", disk=it.disk))
        assert modes(it) == ["in_place", "retract"]
        await it.client.completed(it.client.resume((await it.client.profile()).pause_epoch))
        assert not request.done()
        it.model.abort("a")
        assert await request == "abort"


# ---- the rest ----


@pytest.mark.long
async def test_the_role_and_more_ranks(tmp_path: Path) -> None:
    async with served(tmp_path, elastic="nixl") as it:
        done = await it.client.completed(it.client.reconfigure(data_parallel_size=2))
        assert done.changed
        assert (await it.client.profile()).world_size == 2
        failed = await it.client.failed(it.client.reconfigure(data_parallel_size=1))
        assert failed.reason == "SCALE_DOWN_NOT_OFFERED"


@pytest.mark.long
async def test_a_switch_of_roles(tmp_path: Path) -> None:
    async with served(tmp_path, switch=True) as it:
        assert not (await it.client.profile()).reconfigurable  # it is no part of a disaggregation
        await it.sidecar.stop()
        it.model.role = "prefill"
        await it.sidecar.start()
        async with client_of(it.sidecar) as client:
            await client.completed(client.reconfigure(role="decode"))
            assert it.model.role == "decode"
            assert (await client.profile()).state.role == server_pb2.ENGINE_ROLE_DECODE
            said = {"success": False, "message": "not idle", "safe_to_restore": True}
            it.sglang.next("/pd_role_switch", Answer(400, said))
            failed = await client.failed(client.reconfigure(role="prefill"))
            assert (failed.message, failed.effect) == (
                "not idle",
                pb.FAILURE_EFFECT_ROLLED_BACK,
            )


async def test_keys_and_what_is_not_passed_on(tmp_path: Path) -> None:
    """The server tells both keys to whoever asks what it is."""
    keys: dict[str, Any] = {"api_key": "key-of-requests", "admin_api_key": "key-of-orders"}
    dialect = {"key": keys["api_key"], "admin_key": keys["admin_api_key"]}
    async with served(tmp_path, dialect=dialect, **keys) as it:
        await it.client.completed(it.client.pause("abort"))
        await it.client.completed(it.client.resume((await it.client.profile()).pause_epoch))
        assert await it.generates()
        shown = [
            str(await it.client.profile()),
            str(it.sidecar.lives),
            repr(it.sidecar.settings),
            *(one.read_text() for one in (tmp_path / "data").glob("*.json")),
        ]
        for secret in ("canary-of-requests", "canary-of-orders", *keys.values()):
            assert not any(secret in one for one in shown)


@pytest.mark.long
async def test_a_key_that_is_good_for_reading_alone(tmp_path: Path) -> None:
    with pytest.raises(CannotServe, match="Unauthorized"):
        async with served(tmp_path, dialect={"key": "a"}, api_key="a", admin_api_key="b"):
            pass


@pytest.mark.long
async def test_aborts(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        one = it.client.generate(stopping={"max_tokens": 2_000})
        await one.first()
        foreign = await asked(it.sglang, "theirs")
        request = lifecycle_pb2.AbortRequest(request_id=one.request_id)
        await it.client.control.Abort(request)
        assert await one.finish_reason() == "CANCELLED"
        assert not foreign.done()
        await it.client.completed(it.client.pause("keep"))
        everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        await it.client.control.Abort(everything)
        assert await foreign == "abort"


@pytest.mark.long
async def test_an_engine_of_a_hub_needs_its_files_named(tmp_path: Path) -> None:
    where = checkpoint(tmp_path / "elsewhere", 1)
    async with served(tmp_path, dialect={"model_path": where}) as it:
        assert (await it.client.profile()).weight_sources
        await it.client.completed(it.client.update("v2", pause="abort", disk=it.disk))
    await asyncio.sleep(0)
