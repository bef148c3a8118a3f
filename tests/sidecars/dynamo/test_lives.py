"""Which worker it is, what it offers, and lives that follow one another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.kinds import PauseMode, WeightsState
from app.sidecars.allowed import Allowed
from app.sidecars.answers import Answer, Unreadable
from app.sidecars.dynamo.answers import carried_out, failure_of, loras_of, metrics_of, worker_text
from app.sidecars.dynamo.belief import Belief, Identity
from app.sidecars.dynamo.dialect import DynamoDialect
from app.sidecars.dynamo.workers import OK, SUCCESS, WorkerKind
from app.sidecars.serving import CannotServe
from tests.doubles.dynamo_http import running_worker
from tests.doubles.dynamo_model import Worker
from tests.enginekit.client import Client, client_of, pb, refused, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.dynamo.over import administered
from tests.sidecars.sidecar import Sidecar

pytestmark = pytest.mark.anyio

BOTH = {"pause", "resume"}
KINDS = {
    "vllm": BOTH
    | {"flush_caches", "release_resources", "restore_resources", "update_weights", "load_lora",
       "unload_lora", "abort_requests"},
    "vllm-sidecar": BOTH,
    "sglang": BOTH | {"update_weights"},
    "trtllm": {"release_resources", "restore_resources"},
}  # fmt: skip


def _kinds(profile: pb.AdminProfile) -> set[str]:
    names = (pb.AdminOperationKind.Name(one.kind) for one in profile.operations)
    return {name.removeprefix("ADMIN_OPERATION_KIND_").lower() for name in names}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_is_found_without_a_change(tmp_path: Path, kind: str) -> None:
    named = None if kind.startswith("vllm") else WorkerKind(kind)
    allowed = Allowed(weights_roots=(tmp_path,), lora_roots=(tmp_path,))
    async with (
        running_worker(Worker(kind)) as double,
        administered(
            double, tmp_path / "data", dialect=DynamoDialect(kind=named), allowed=allowed
        ) as (_, client),
    ):
        profile = await client.profile()
        assert _kinds(profile) == KINDS[kind]
        assert not double.orders()
        pauses = kind != "trtllm"
        assert list(profile.new_requests) == ([pb.NEW_REQUESTS_HOLD] if pauses else [])


@pytest.mark.long
async def test_a_worker_that_does_not_tell_what_it_is(tmp_path: Path) -> None:
    async with running_worker(Worker("sglang")) as double:
        for dialect, words in (
            (DynamoDialect(), "--worker"),
            (DynamoDialect(kind=WorkerKind.SGLANG), "--model"),
        ):
            double.label = "tiny" if words == "--worker" else ""
            with pytest.raises(CannotServe, match=words):
                await Sidecar(double, tmp_path / "data", dialect=dialect).start()
        assert not double.orders()


@pytest.mark.long
async def test_a_worker_that_has_no_endpoint_yet_is_waited_for(tmp_path: Path) -> None:
    async with running_worker(label=None) as double:
        sidecar = Sidecar(double, tmp_path / "data", dialect=DynamoDialect())
        sidecar.settings = replace(sidecar.settings, wait_s=0.0)
        with pytest.raises(CannotServe, match="no endpoint yet"):
            await sidecar.start()


async def test_a_worker_that_is_started_anew_is_another_instance(tmp_path: Path) -> None:
    async with (
        running_worker() as double,
        administered(double, tmp_path / "data") as (sidecar, client),
    ):
        await client.completed(client.pause("abort"))
        first = sidecar.instance_id
        await double.restart(Worker())
        await until(lambda: len(sidecar.lives) == 2, 30)
        assert sidecar.instance_id != first
        async with client_of(sidecar) as other:
            assert await other.admission() == "open"


async def test_what_is_not_to_be_read_outlives_the_sidecar(tmp_path: Path) -> None:
    root = tmp_path / "files"
    disk = pb.DiskWeights(path=str(checkpoint(root / "new", 2)))
    allowed = Allowed(weights_roots=(root,))
    async with running_worker() as double:
        double.worker.update_error = "no"
        async with administered(double, tmp_path / "data", allowed=allowed) as (_, client):
            await client.failed(client.update("v2", pause="keep", disk=disk))
        async with administered(double, tmp_path / "data", allowed=allowed) as (_, client):
            state = (await client.profile()).state
            assert state.admission == pb.ADMISSION_STATE_PAUSED
            assert state.pause.mode == pb.PAUSE_MODE_KEEP
            assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
            epoch = (await client.profile()).pause_epoch
            refusal = await refused(client.stream(client.resume(epoch)))
            assert refusal.reason == "WEIGHTS_NOT_VALID"
        assert double.worker.state == "all"


async def test_an_engine_that_its_worker_cannot_reach_is_lost(tmp_path: Path) -> None:
    """A worker that is paused is not one."""
    async with (
        running_worker() as double,
        administered(double, tmp_path / "data") as (_, client),
    ):

        async def lost() -> bool:
            return bool((await client.profile()).state.ranks)

        await client.completed(client.pause("keep"))
        assert not await lost()
        double.worker.dead = True
        await until(lost)
        (rank,) = (await client.profile()).state.ranks
        assert rank.message == "the engine does not answer its worker"
        double.worker.dead = False
        await _until_well(client)


async def _until_well(client: Client) -> None:
    async def well() -> bool:
        return not (await client.profile()).state.ranks

    await until(well)


# ---- without a server ----


def answer(body: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(body).encode())


def test_what_an_answer_says() -> None:
    assert failure_of(answer({"status": "ok"})) is None
    assert failure_of(answer({"success": True, "message": "done"})) is None
    assert failure_of(answer({"status": "error", "message": "a\nb"})) == "a b"
    assert failure_of(answer({"status": "error"})) == "the worker says that it failed"
    assert failure_of(answer({"success": False, "error": "no"})) == "no"
    wrong: tuple[Any, ...] = (None, [], "ok", 1)
    for body in wrong:
        with pytest.raises(Unreadable):
            failure_of(answer(body))
    assert carried_out(answer({"status": "success"}), OK)["status"] == "success"
    for says, body in ((OK, {}), (OK, {"status": True}), (SUCCESS, {"success": 1})):
        with pytest.raises(Unreadable):
            carried_out(answer(body), says)
    told = answer({"error": "Handler error", "message": "RuntimeError: /srv/secret"}, 500)
    assert worker_text(told) == "Handler error"
    assert worker_text(Answer(404, b"Route not found")) == "the engine answered with status 404"
    assert loras_of(answer({"loras": {"a": 3}})) == {"a": 3}
    for body in ({"loras": []}, {"loras": {"a": True}}, {}):
        with pytest.raises(Unreadable):
            loras_of(answer(body))


def test_metrics_of_a_worker() -> None:
    text = b"""dynamo_component_uptime_seconds{worker_id="a1"} 9.5
dynamo_component_inflight_requests{dynamo_endpoint="generate",model="tiny",worker_id="a1"} 2
dynamo_component_inflight_requests{dynamo_endpoint="load_lora",worker_id="a1"} 1
"""
    metrics = metrics_of(Answer(200, text))
    found = (metrics.worker_id, metrics.uptime_s, metrics.in_flight, metrics.model)
    assert found == ("a1", 9.5, 2, "tiny")
    nothing = metrics_of(Answer(200, b"process_start_time_seconds 5\n"))
    assert (nothing.worker_id, nothing.uptime_s, nothing.in_flight, nothing.model) == (None,) * 4


def test_beliefs_are_of_one_life() -> None:
    identity = Identity("a", 1000.0)
    belief = Belief(
        paused=PauseMode.KEEP, asleep=True, weights=WeightsState.INCONSISTENT, version="v1"
    ).came("a", "/a")
    document = json.loads(json.dumps(belief.document(identity)))
    assert Belief.of(document, Identity("a", 1001.5)) == belief
    # Under another id it may be the same process: what is wrong with it stays wrong.
    assert Belief.of(document, Identity("b", 1000.0)) == belief
    # Under the same one it may be another: an id that is made of a name comes again.
    assert Belief.of(document, Identity("a", 1060.0)) is None
    # A clock that was set since then tells another time, and the one that is never set does not.
    uptime = json.loads(json.dumps(belief.document(Identity("a", 1000.0, 50.0))))
    assert Belief.of(uptime, Identity("a", 4600.0, 50.2)) == belief
    assert Belief.of(uptime, Identity("a", 4600.0, 90.0)) is None
    assert Belief.of(None, identity) is None
    damaged: tuple[Any, ...] = ({}, [], {**document, "paused": "?"}, {**document, "adapters": 5})
    for one in damaged:
        with pytest.raises(ValueError):  # noqa: PT011
            Belief.of(one, identity)
    assert belief.came("a", "/b").path_of("a") == "/b"
    assert belief.went("a").path_of("a") == ""
