"""Orders to a worker that answers 200 whatever becomes of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine_http import Answer, Die, Hang
from tests.enginekit.client import pb, refused, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.dynamo.over import asked, over_worker

from app.rpc.openengine.v1 import lifecycle_pb2, lora_pb2  # isort: skip

pytestmark = pytest.mark.anyio

LONG = pytest.mark.long
MODES = {"keep": "keep", "abort": "abort", "drain": "wait"}


@pytest.mark.parametrize(
    "kind", ["vllm", pytest.param("vllm-sidecar", marks=LONG), pytest.param("sglang", marks=LONG)]
)
async def test_each_mode_in_the_words_of_the_worker(tmp_path: Path, kind: str) -> None:
    words = {"keep": "in_place", "abort": "abort", "drain": "in_place"}
    async with over_worker(tmp_path, kind) as (double, client, _):
        for mode, word in (words if kind == "sglang" else MODES).items():
            await client.completed(client.pause(mode))
            assert double.worker.state != "open"
            name, body = double.orders()[-1]
            assert name.endswith("pause_generation")
            assert body["mode"] == word
            assert body.get("clear_cache") in (None, False)
            await client.completed(client.resume((await client.profile()).pause_epoch))
            assert double.worker.state == "open"
        assert await client.admission() == "open"


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=LONG), "sglang"])
async def test_a_drain_waits_for_requests(tmp_path: Path, kind: str) -> None:
    async with over_worker(tmp_path, kind, token_s=0.02) as (double, client, _):
        request = await asked(double.worker, 20)
        await client.completed(client.pause("drain"))
        assert await request == 20
        assert double.worker.state != "open"


@LONG
async def test_a_drain_that_is_called_off_is_over_when_its_requests_are(tmp_path: Path) -> None:
    """The worker takes nothing meanwhile, not even that it is called off."""
    async with over_worker(tmp_path, token_s=0.02) as (double, client, _):
        request = await asked(double.worker, 100)
        order = client.pause("drain")
        draining = client.stream(order)
        await until(lambda: double.worker.state == "new")
        operation = (await anext(aiter(draining))).operation_id
        await client.cancel(operation)
        ended = [event async for event in draining][-1]
        assert ended.WhichOneof("event") == "cancelled"
        assert await request == 100
        assert double.worker.state == "open"
        assert await client.admission() == "open"


@LONG
async def test_an_error_under_status_200_is_a_failure(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, _):
        request = await asked(double.worker, 100_000, lora="a")
        failed = await client.failed(client.pause("keep"))
        assert failed.reason == "ENGINE_REFUSED"
        assert "active LoRA requests" in failed.message
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert await client.admission() == "open"
        await client.completed(client.pause("abort"))
        assert await request < 100_000


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(200, {"status": "error", "message": "no"}), "ENGINE_REFUSED"),
        pytest.param(Answer(200, {"success": False}), "ENGINE_REFUSED", marks=LONG),
        pytest.param(Answer(200, {"error": "no"}), "ENGINE_REFUSED", marks=LONG),
        (Answer(200, {}), "WRONG_ANSWER"),
        pytest.param(Answer(200, None), "WRONG_ANSWER", marks=LONG),
        pytest.param(Answer(200, ["ok"]), "WRONG_ANSWER", marks=LONG),
        pytest.param(Answer(200, {"status": "ok", "mode": "wait"}), "NOT_CARRIED_OUT", marks=LONG),
        (Answer(500, {"error": "Handler error", "message": "/srv/secret"}), "ENGINE_REFUSED"),
    ],
)
async def test_what_does_not_say_that_it_is_done_is_not(
    tmp_path: Path, answer: Answer, reason: str
) -> None:
    async with over_worker(tmp_path) as (double, client, _):
        double.next("/engine/pause_generation", answer)
        failed = await client.failed(client.pause("abort"))
        assert failed.reason == reason
        assert "secret" not in failed.message
        # Whatever it did is taken back.
        assert double.worker.calls[-1][0] in ("resume_generation", "liveness_probe",
                                              "get_weight_version")  # fmt: skip
        assert await client.admission() == "open"


async def test_a_route_that_is_kept_from_everybody_has_done_nothing(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, root):
        double.denied = {"pause_generation"}
        failed = await client.failed(client.pause("abort"))
        assert failed.reason == "ROUTE_NOT_THERE"
        assert not double.orders("resume_generation")
        double.denied = {"control/sleep", "update_weights_from_disk"}
        disk = pb.DiskWeights(path=str(checkpoint(root / "new", 2)))
        for order in (client.release("weights"), client.update("v2", pause="abort", disk=disk)):
            assert (await client.failed(order)).reason == "ROUTE_NOT_THERE"
        profile = await client.profile()
        assert profile.state.weights.state == pb.WEIGHTS_STATE_VALID
        assert not profile.state.released
        assert await client.admission() == "open"


@LONG
async def test_a_cache_in_use_is_not_called_empty(tmp_path: Path) -> None:
    """The worker says that it is, always."""
    async with over_worker(tmp_path) as (double, client, _):
        request = await asked(double.worker, 100_000)
        failed = await client.failed(client.flush())
        assert (failed.reason, failed.retryable) == ("CACHE_IN_USE", True)
        await client.completed(client.pause("abort"))
        await request
        await client.completed(client.flush())
        assert double.worker.flushed == 1


# ---- memory ----


async def test_it_sleeps_and_wakes_wholly(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, _):
        request = await asked(double.worker, 100_000)
        await client.completed(client.pause("keep"))
        # Asleep, it would have ended it.
        assert (await client.failed(client.release("weights"))).reason == "REQUESTS_FROZEN"
        await client.completed(client.pause("abort"))
        assert await request < 100_000
        order = client.release("weights")
        await client.completed(order)
        # The second time it is the same order, told once more.
        events = await client.order(order)
        warned = {event.warning.reason for event in events if event.HasField("warning")}
        assert {"KV_CACHE_RELEASED_TOO", "WORKER_UNROUTED"} <= warned
        assert (double.worker.level, double.worker.routed) == (1, False)
        profile = await client.profile()
        assert list(profile.state.released) == [pb.RESOURCE_KIND_WEIGHTS]
        with_it = client.stream(client.resume(profile.pause_epoch))
        assert (await refused(with_it)).reason == "RESOURCES_RELEASED"
        await client.completed(client.restore("weights", epoch=profile.release_epoch))
        assert ("control/wake_up", {}) in double.orders()
        # It has opened itself, and is closed again.
        assert (double.worker.level, double.worker.state) == (0, "all")
        await client.completed(client.resume((await client.profile()).pause_epoch))
        assert await (await asked(double.worker, 3)) == 3
        assert not double.worker.dead


@LONG
async def test_a_worker_that_sleeps_already_may_have_lost_its_weights(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, root):
        await client.completed(client.pause("abort"))
        await double.worker.sleep({"level": 2})
        assert (await client.failed(client.release("weights"))).reason == "ASLEEP_ALREADY"
        profile = await client.profile()
        assert profile.state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
        assert list(profile.state.released) == [pb.RESOURCE_KIND_WEIGHTS]
        await client.completed(client.restore("weights", epoch=profile.release_epoch))
        epoch = (await client.profile()).pause_epoch
        assert (await refused(client.stream(client.resume(epoch)))).reason == "WEIGHTS_NOT_VALID"
        disk = pb.DiskWeights(path=str(checkpoint(root / "new", 2)))
        await client.completed(client.update("v2", disk=disk))
        await client.completed(client.resume(epoch))
        assert await (await asked(double.worker, 3)) == 3


async def test_a_worker_without_a_pause_closes_by_itself(tmp_path: Path) -> None:
    async with over_worker(tmp_path, "trtllm", token_s=0.02) as (double, client, _):
        request = await asked(double.worker, 20)
        await client.completed(client.release("weights"))
        assert await request == 20  # it was waited for
        assert (double.worker.level, double.worker.routed) == (1, False)
        profile = await client.profile()
        assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
        assert list(profile.state.released) == [pb.RESOURCE_KIND_WEIGHTS]
        await client.completed(client.restore("weights", epoch=profile.release_epoch))
        assert double.worker.level == 0

        async def opened() -> bool:
            return await client.admission() == "open"

        await until(opened)
        request = await asked(double.worker, 100_000)
        failed = await client.failed(client.release("weights", deadline_ms=2_000))
        assert "Timed out" in failed.message
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert (double.worker.level, double.worker.state) == (0, "open")
        request.cancel()


# ---- weights ----


async def test_an_update_is_read_back_and_not_verified(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, root):
        new = checkpoint(root / "new", 2)
        disk = pb.DiskWeights(path=str(new))
        completed = await client.completed(client.update("v2", pause="keep", disk=disk))
        assert completed.verification == pb.VERIFICATION_UNVERIFIED
        assert double.orders("update_weights_from_disk") == [
            ("update_weights_from_disk", {"model_path": str(new), "weight_version": "v2"})
        ]
        state = (await client.profile()).state
        assert (state.weights.version, state.weights.state) == ("v2", pb.WEIGHTS_STATE_VALID)
        assert double.worker.state == "open"


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=LONG)])
async def test_an_update_that_breaks_off_keeps_it_closed(tmp_path: Path, kind: str) -> None:
    async with over_worker(tmp_path, kind) as (double, client, root):
        double.worker.update_error = "out of memory"
        disk = pb.DiskWeights(path=str(checkpoint(root / "new", 2)))
        failed = await client.failed(client.update("v2", pause="abort", disk=disk))
        assert (failed.reason, failed.message) == ("ENGINE_REFUSED", "out of memory")
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        epoch = (await client.profile()).pause_epoch
        assert (await refused(client.stream(client.resume(epoch)))).reason == "WEIGHTS_NOT_VALID"
        assert double.worker.state != "open"
        double.worker.update_error = None
        await client.completed(client.update("v3", disk=disk))
        await client.completed(client.resume(epoch))
        assert await (await asked(double.worker, 3)) == 3


@LONG
async def test_an_update_that_is_not_seen_is_none(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, root):
        double.worker.lies = True
        disk = pb.DiskWeights(path=str(checkpoint(root / "new", 2)))
        failed = await client.failed(client.update("v2", pause="abort", disk=disk))
        assert failed.reason == "VERSION_NOT_SEEN"
        state = (await client.profile()).state
        assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT


@LONG
async def test_somebody_resumes_behind_the_pause(tmp_path: Path) -> None:
    """This worker does not tell, and refuses the update itself."""
    async with over_worker(tmp_path) as (double, client, root):
        await client.completed(client.pause("abort"))
        await double.worker.resume_generation({})
        disk = pb.DiskWeights(path=str(checkpoint(root / "new", 2)))
        failed = await client.failed(client.update("v2", disk=disk))
        assert failed.message.startswith("Worker must be paused")
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert await client.admission() == "open"  # as it is
        state = (await client.profile()).state
        assert state.weights.state == pb.WEIGHTS_STATE_VALID


@LONG
async def test_weights_that_do_not_fit_are_not_sent(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, root):
        (root / "bad").mkdir()
        (root / "bad" / "model.safetensors").write_bytes(b"none")
        for path, reason in ((root / "bad", "WEIGHTS_UNFIT"), (tmp_path, "PATH_NOT_ALLOWED")):
            disk = pb.DiskWeights(path=str(path))
            failed = await client.failed(client.update("v2", pause="abort", disk=disk))
            assert failed.reason == reason
        assert not double.orders("update_weights_from_disk")


# ---- adapters and requests ----


def _load(name: str, path: Path) -> lora_pb2.LoadLoraRequest:
    adapter = lora_pb2.LoraAdapter(lora_name=name, source_path=str(path))
    return lora_pb2.LoadLoraRequest(adapter=adapter)


async def test_adapters(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, root):
        loaded = await client.control.LoadLora(_load("a", root / "lora"))
        assert loaded.adapter.lora_id == double.worker.loras["a"][0]
        assert double.worker.loras["a"][1] == f"file://{root / 'lora'}"
        assert (await client.control.LoadLora(_load("a", root / "lora"))).already_loaded
        # By somebody else: the worker would say that it has loaded it, and go on with theirs.
        await double.worker.load_lora({"lora_name": "b", "source": {"uri": "file:///other"}})

        async def seen() -> bool:
            return len((await client.profile()).state.loras) == 2

        await until(seen)
        taken = await refused(client.control.LoadLora(_load("b", root / "lora")))
        assert taken.code.name == "ALREADY_EXISTS"
        outside = await refused(client.control.LoadLora(_load("c", tmp_path)))
        assert outside.reason == "PATH_NOT_ALLOWED"
        await client.control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="a"))
        assert "a" not in double.worker.loras


@LONG
async def test_ending_requests_is_not_known_to_have_worked(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, _):
        abort = client.control.Abort
        unknown = await refused(abort(lifecycle_pb2.AbortRequest(request_id="x")))
        assert unknown.code.name == "NOT_FOUND"
        assert not double.orders("abort_request")
        request = await asked(double.worker, 100_000, request_id="a")
        told = await client.control.Abort(lifecycle_pb2.AbortRequest(request_id="a"))
        assert told.status == lifecycle_pb2.ABORT_STATUS_UNSPECIFIED
        assert await request < 100_000
        every = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        assert (await refused(abort(every))).reason == "ABORT_ALL_NOT_OFFERED"


@LONG
async def test_requests_do_not_come_through_here(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (_, client, _):
        one = client.generate(stopping={"max_tokens": 2})
        refusal: Any = await refused(one.first())
        assert "frontend" in str(refusal)


# ---- answers that do not come ----


async def test_an_order_goes_on_when_nobody_waits_for_it(tmp_path: Path) -> None:
    """So it is taken back, and not taken for undone."""
    async with over_worker(tmp_path) as (double, client, _):
        double.next("/engine/pause_generation", Hang())
        failed = await client.failed(client.pause("abort", deadline_ms=2000))
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert [name for name, _ in double.orders()] == ["pause_generation", "resume_generation"]
        assert double.worker.state == "open"


@LONG
async def test_a_worker_that_ends_in_the_midst(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, _):
        double.next("/engine/pause_generation", Die())
        failed = await client.failed(client.pause("abort"))
        assert failed.reason in ("ENGINE_DIED", "ENGINE_NOT_ANSWERING")

        async def lost() -> bool:
            return bool((await client.profile()).state.ranks)

        await until(lost)
        await asyncio.sleep(0)
