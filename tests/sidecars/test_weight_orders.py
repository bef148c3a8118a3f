"""New weights from files, and what is done so that they never end an engine."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.conformance.tensors import not_finite, written
from app.sidecars.allowed import Allowed
from tests.doubles.engine_http import Answer, Die
from tests.doubles.vllm_http import VllmDouble, running_vllm
from tests.enginekit.client import Client, client_of, pb, refused
from tests.sidecars.checkpoints import checkpoint, weights
from tests.sidecars.sidecar import Sidecar, administered, asked

pytestmark = pytest.mark.anyio

UPDATES = (
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/reset_prefix_cache", "/weight_checker",
)  # fmt: skip


@asynccontextmanager
async def updatable(
    tmp_path: Path, *, backend: str = "disk", look_s: float = 0.1, draft: bool = False
) -> AsyncIterator[tuple[VllmDouble, Client, pb.DiskWeights, Sidecar]]:
    """With other weights below an allowed root."""
    root = tmp_path / "weights"
    new = checkpoint(root / "new", 2)
    model = checkpoint(tmp_path / "model", 1)
    async with (
        running_vllm(model, model={"backend": backend}, draft=draft) as vllm,
        administered(
            vllm, tmp_path / "data", allowed=Allowed(weights_roots=(root,)), look_s=look_s
        ) as (sidecar, client),
    ):
        yield vllm, client, pb.DiskWeights(path=str(new)), sidecar


async def warnings_of(client: Client, request: Any) -> list[str]:
    events = await client.order(request)
    assert events[-1].HasField("completed"), events[-1]
    return [event.warning.reason for event in events if event.HasField("warning")]


async def test_one_update_is_all_of_its_calls(tmp_path: Path) -> None:
    async with updatable(tmp_path) as (vllm, client, disk, _):
        completed = await client.completed(client.update("v2", pause="abort", disk=disk))
        assert vllm.orders(*UPDATES) == [
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache?reset_running_requests=true",
            "/weight_checker",
        ]
        assert vllm.bodies("/update_weights") == [{"update_info": {"path": disk.path}}]
        assert vllm.model.version == "v2"
        assert completed.verification == pb.VERIFICATION_VERIFIED
        (evidence,) = completed.update_weights.evidence
        assert evidence.tensors == 3
        assert len(evidence.sha256) == 32
        state = (await client.profile()).state
        assert (state.weights.version, state.weights.state) == ("v2", pb.WEIGHTS_STATE_VALID)
        assert vllm.model.pause_state == "open"
        # The second time the transfer is initialised already.
        await client.completed(client.update("v3", pause="abort", disk=disk))
        assert vllm.orders("/init_weight_transfer_engine") == ["/init_weight_transfer_engine"]


@pytest.mark.long
async def test_a_backend_that_takes_files(tmp_path: Path) -> None:
    async with updatable(tmp_path, backend="file") as (vllm, client, disk, _):
        await client.completed(client.update("v2", pause="keep", disk=disk))
        path = f"{disk.path}/model.safetensors"
        assert vllm.bodies("/update_weights") == [{"update_info": {"path": path}}]


@pytest.mark.long
async def test_digests_and_numbers_are_looked_at_here_and_by_the_backend(tmp_path: Path) -> None:
    async with updatable(tmp_path) as (vllm, client, disk, _):
        file = Path(disk.path) / "model.safetensors"
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        named = pb.DiskWeights(path=disk.path)
        named.digests.add(name=file.name, sha256=bytes.fromhex(digest))
        order = client.update("v2", pause="abort", disk=named, check_finite=True)
        await client.completed(order)
        (body,) = vllm.bodies("/update_weights")
        assert body["update_info"]["files"] == {file.name: digest}
        assert body["update_info"]["check_finite"] is True
        named.digests[0].sha256 = bytes(32)
        failed = await client.failed(client.update("v3", pause="abort", disk=named))
        assert failed.reason == "WEIGHTS_UNFIT"
        file.write_bytes(written(not_finite(weights(2))))
        order = client.update("v3", pause="abort", disk=disk, check_finite=True)
        assert (await client.failed(order)).reason == "WEIGHTS_UNFIT"
        assert len(vllm.orders("/start_weight_update")) == 1


async def test_traffic_is_never_met_by_a_start(tmp_path: Path) -> None:
    """vLLM starts an update under requests, and ends with the next step of one of them."""
    async with updatable(tmp_path, backend="file") as (vllm, client, disk, _):
        request = await asked(vllm, "a")
        refusal = await refused(client.stream(client.update("v2", disk=disk)))
        assert refusal.reason == "NOT_PAUSED"
        assert not vllm.orders("/start_weight_update")
        await client.completed(client.update("v2", pause="keep", disk=disk))
        assert not vllm.model.dead
        assert not request.done()  # it goes on, on the new weights
        vllm.model.abort_ids([])
        await request


@pytest.mark.long
async def test_somebody_resumes_behind_the_pause(tmp_path: Path) -> None:
    """Seen before the start, by asking once more."""
    async with updatable(tmp_path, backend="file", look_s=60) as (vllm, client, disk, _):
        await client.completed(client.pause("abort"))
        vllm.model.resume()
        failed = await client.failed(client.update("v2", disk=disk))
        assert failed.reason == "NOT_PAUSED"
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert not vllm.orders("/start_weight_update")


@pytest.mark.parametrize(
    "broken",
    [
        "/update_weights",
        pytest.param("/start_weight_update", marks=pytest.mark.long),
        pytest.param("/finish_weight_update", marks=pytest.mark.long),
    ],
)
async def test_whatever_fails_after_the_start_keeps_the_engine_closed(
    tmp_path: Path, broken: str
) -> None:
    """vLLM resumes when it is told to, and ends with the next request. The way back is a whole
    good update."""
    async with updatable(tmp_path, backend="file") as (vllm, client, disk, _):
        vllm.next(
            broken,
            Answer(500, {"error": {"message": "Worker failed with error 'no', please check"}}),
        )
        failed = await client.failed(client.update("v2", pause="abort", disk=disk))
        assert failed.reason == "ENGINE_REFUSED"
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        profile = await client.profile()
        assert profile.state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
        assert profile.state.weights.version == "default"
        assert await client.admission() == "paused"
        refusal = await refused(client.stream(client.resume(profile.pause_epoch)))
        assert refusal.reason == "WEIGHTS_NOT_VALID"
        assert vllm.model.pause_state != "open"

        await client.completed(client.update("v3", disk=disk))
        state = (await client.profile()).state
        assert (state.weights.version, state.weights.state) == ("v3", pb.WEIGHTS_STATE_VALID)
        await client.completed(client.resume((await client.profile()).pause_epoch))
        one = client.generate(stopping={"max_tokens": 2})
        assert await one.finish_reason() == "LENGTH"
        assert not vllm.model.dead


async def test_a_sidecar_that_is_started_anew_knows_of_broken_weights(tmp_path: Path) -> None:
    async with updatable(tmp_path, backend="file") as (vllm, client, disk, sidecar):
        vllm.model.update_error = "no"
        await client.failed(client.update("v2", pause="abort", disk=disk))
        await sidecar.stop()
        vllm.model.update_error = None
        await sidecar.start()
        async with client_of(sidecar) as other:
            profile = await other.profile()
            assert profile.state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
            assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
            assert profile.state.pause.mode == pb.PAUSE_MODE_ABORT
            refusal = await refused(other.stream(other.resume(profile.pause_epoch)))
            assert refusal.reason == "WEIGHTS_NOT_VALID"
            await other.completed(other.update("v3", disk=disk))
            await other.completed(other.resume(profile.pause_epoch))
        assert (vllm.model.pause_state, vllm.model.version) == ("open", "v3")


@pytest.mark.long
async def test_success_that_is_not_seen_is_none(tmp_path: Path) -> None:
    async with updatable(tmp_path) as (vllm, client, disk, _):
        vllm.model.lie_of_success = True
        failed = await client.failed(client.update("v2", pause="abort", disk=disk))
        assert failed.reason == "VERSION_NOT_SEEN"
        assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT


async def test_weights_have_not_come_by_an_answer_of_somebody_else(tmp_path: Path) -> None:
    """As of a proxy, with status 200: the version would be read back all the same."""
    async with updatable(tmp_path, backend="file") as (vllm, client, disk, _):
        vllm.next("/update_weights", Answer(200, "nonsense"))
        failed = await client.failed(client.update("v2", pause="abort", disk=disk))
        assert failed.reason == "WRONG_ANSWER"
        state = (await client.profile()).state
        assert (state.weights.state, vllm.model.version) == (
            pb.WEIGHTS_STATE_INCONSISTENT,
            "default",
        )


@pytest.mark.long
async def test_vacuous_checksums_prove_nothing(tmp_path: Path) -> None:
    async with updatable(tmp_path) as (vllm, client, disk, _):
        vllm.model.vacuous = True
        request = client.update("v2", pause="abort", disk=disk)
        assert "EVIDENCE_VACUOUS" in await warnings_of(client, request)
        completed = await client.completed(request)  # again, by its key
        assert completed.verification == pb.VERIFICATION_UNVERIFIED
        assert not completed.update_weights.evidence


@pytest.mark.long
async def test_the_engine_ends_in_the_midst_of_an_update(tmp_path: Path) -> None:
    """A call that is under way then is never answered."""
    async with updatable(tmp_path, backend="file") as (vllm, client, disk, _):
        vllm.next("/update_weights", Die())
        failed = await client.failed(client.update("v2", pause="abort", disk=disk))
        assert failed.reason == "ENGINE_DIED"
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART


@pytest.mark.long
async def test_paths_outside_the_roots(tmp_path: Path) -> None:
    async with updatable(tmp_path) as (vllm, client, disk, _):
        outside = checkpoint(tmp_path / "outside", 3)
        link = Path(disk.path).parent / "link"
        link.symlink_to(outside)
        for path in (str(outside), str(link), "relative", "/", f"{disk.path}/../../outside"):
            order = client.update("v2", pause="abort", disk=pb.DiskWeights(path=path))
            failed = await client.failed(order)
            assert (failed.reason, failed.effect) == ("PATH_NOT_ALLOWED", pb.FAILURE_EFFECT_NONE)
        assert not vllm.orders("/start_weight_update", "/pause")


@pytest.mark.long
async def test_discarded_weights_come_back_by_an_update(tmp_path: Path) -> None:
    async with updatable(tmp_path) as (vllm, client, disk, _):
        await client.completed(client.release("weights", "kv_cache", content="discard"))
        epoch = (await client.profile()).release_epoch
        failed = await client.failed(client.restore("kv_cache", epoch=epoch))
        assert failed.reason == "WEIGHTS_FIRST"
        await client.completed(client.restore("weights", "kv_cache", epoch=epoch))
        assert vllm.model.asleep == {"kv_cache"}
        assert "ADMISSION_OPENED_BRIEFLY" in await warnings_of(
            client, client.update("v2", disk=disk)
        )
        assert vllm.model.asleep == set()
        assert vllm.model.pause_state != "open"
        await client.completed(client.resume((await client.profile()).pause_epoch))
        one = client.generate(stopping={"max_tokens": 2})
        assert await one.finish_reason() == "LENGTH"


@pytest.mark.long
async def test_a_backend_that_refuses_before_it_touches_anything(tmp_path: Path) -> None:
    refusal = (
        "Call failed: Worker failed with error 'does not fit (weights unchanged)', please check"
    )
    async with updatable(tmp_path) as (vllm, client, disk, _):
        vllm.next("/update_weights", Answer(500, {"error": {"message": refusal}}))
        failed = await client.failed(client.update("v2", pause="abort", disk=disk))
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        state = (await client.profile()).state
        assert state.weights.state == pb.WEIGHTS_STATE_VALID
        assert vllm.model.pause_state == "open"


@pytest.mark.long
async def test_the_draft_model_by_itself(tmp_path: Path) -> None:
    async with updatable(tmp_path, draft=True) as (vllm, client, disk, _):
        draft, target = pb.COMPONENT_DRAFT, pb.COMPONENT_TARGET
        both = client.update("v2", pause="abort", disk=disk, components=[target, draft])
        assert (await client.failed(both)).reason == "ONE_COMPONENT"
        await client.completed(client.update("v2", pause="abort", disk=disk, components=[draft]))
        assert vllm.orders("/start_draft_weight_update", "/start_weight_update") == [
            "/start_draft_weight_update"
        ]
