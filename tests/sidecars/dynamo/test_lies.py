"""Orders that a worker goes on with when they are given up, and that never reached it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.rpc.openengine.v1 import lora_pb2
from app.sidecars.answers import Answer as Answered
from app.sidecars.dynamo.answers import metrics_of
from tests.doubles.dynamo_http import DynamoDouble
from tests.doubles.dynamo_model import Callback
from tests.doubles.engine_http import Hang
from tests.enginekit.client import pb, refused, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.dynamo.over import asked, over_worker

pytestmark = pytest.mark.anyio


def _slow(double: DynamoDouble, route: str) -> Callable[[], None]:
    """What is ordered there takes until it is told to go on."""
    go_on, worker = asyncio.Event(), double.worker
    callbacks = worker.callbacks

    def slowed() -> dict[str, Callback]:
        found = callbacks()
        carry_out = found[route]

        async def slow(body: Any) -> Any:
            worker.calls.append((route, body))
            await go_on.wait()
            return await carry_out(body)

        return {**found, route: slow}

    worker.callbacks = slowed  # type: ignore[method-assign]

    def let_it() -> None:
        worker.callbacks = callbacks  # type: ignore[method-assign]
        go_on.set()

    return let_it


async def test_a_worker_that_falls_asleep_late_is_woken_then(tmp_path: Path) -> None:
    """Asked before that it says that it is awake, and would be asleep behind an open gate."""
    async with over_worker(tmp_path) as (double, client, _):
        let_it = _slow(double, "control/sleep")
        releasing = asyncio.create_task(client.failed(client.release("weights", deadline_ms=2_000)))
        await until(lambda: double.orders("control/sleep"))
        await asyncio.sleep(2.0)  # the order's own deadline
        assert not double.orders("control/wake_up")
        let_it()
        failed = await releasing
        assert failed.reason == "DEADLINE_EXCEEDED"
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert (double.worker.level, double.worker.state) == (0, "open")
        state = (await client.profile()).state
        assert not state.released
        assert state.weights.state == pb.WEIGHTS_STATE_VALID
        assert await (await asked(double.worker, 3)) == 3


@pytest.mark.long
async def test_a_worker_that_wakes_late_is_closed_then(tmp_path: Path) -> None:
    """It opens itself when it wakes, whoever has gone meanwhile."""
    async with over_worker(tmp_path) as (double, client, _):
        await client.completed(client.release("weights"))
        let_it = _slow(double, "control/wake_up")
        epoch = (await client.profile()).release_epoch
        order = client.restore("weights", epoch=epoch, deadline_ms=1_000)
        restoring = asyncio.create_task(client.failed(order))
        await until(lambda: double.orders("control/wake_up"))
        await asyncio.sleep(1.0)  # the order's own deadline
        let_it()
        assert (await restoring).effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        assert (double.worker.level, double.worker.state) == (0, "all")

        async def awake() -> bool:
            state = (await client.profile()).state
            return not (state.released or state.ranks)

        await until(awake)
        await client.completed(client.resume((await client.profile()).pause_epoch))
        assert await (await asked(double.worker, 3)) == 3


@pytest.mark.parametrize("order", ["pause", pytest.param("resume", marks=pytest.mark.long)])
async def test_what_takes_effect_when_it_was_long_given_up_is_put_back(
    tmp_path: Path, order: str
) -> None:
    """A worker does not tell whether it is paused: it would stay the other way unseen."""
    async with over_worker(tmp_path) as (double, client, _):
        request: Any = client.pause("abort", deadline_ms=1_000)
        if order == "resume":
            await client.completed(client.pause("abort"))
            request = client.resume((await client.profile()).pause_epoch, deadline_ms=1_000)
        name = f"{order}_generation"
        let_it = _slow(double, name)
        failed = await client.failed(request)
        assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        put_back = "resume_generation" if order == "pause" else "pause_generation"
        sent = len(double.orders(put_back))
        assert (await client.failed(client.pause("keep"))).reason == "WORKER_BUSY"
        let_it()
        await until(lambda: len(double.orders(put_back)) > sent)
        wanted = "open" if order == "pause" else "all"
        await until(lambda: double.worker.state == wanted)
        assert await client.admission() == ("open" if order == "pause" else "paused")


async def test_nothing_crosses_an_update_that_was_given_up(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, root):
        await client.completed(client.pause("abort"))
        let_it = _slow(double, "update_weights_from_disk")
        disk = pb.DiskWeights(path=str(checkpoint(root / "new", 2)))
        failed = await client.failed(client.update("v2", disk=disk, deadline_ms=1_000))
        assert failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        again = await client.failed(client.update("v3", disk=disk))
        assert (again.reason, again.retryable) == ("WORKER_BUSY", True)
        assert len(double.orders("update_weights_from_disk")) == 1  # that it is at
        let_it()
        await until(lambda: double.worker.version == "v2")
        epoch = (await client.profile()).pause_epoch
        assert (await refused(client.stream(client.resume(epoch)))).reason == "WEIGHTS_NOT_VALID"

        async def updated() -> bool:
            events = await client.order(client.update("v3", disk=disk))
            return events[-1].HasField("completed")

        await until(updated)
        await client.completed(client.resume(epoch))


async def test_an_order_that_did_not_reach_the_worker_leaves_its_weights_right(
    tmp_path: Path,
) -> None:
    """A disk that is full, here: what could not be noted is not begun."""
    async with over_worker(tmp_path) as (double, client, root):
        await client.completed(client.pause("abort"))
        disk = pb.DiskWeights(path=str(checkpoint(root / "new", 2)))
        (tmp_path / "data" / "engine.new").mkdir()
        for order in (client.update("v2", disk=disk), client.release("weights")):
            failed = await client.failed(order)
            assert (failed.reason, failed.retryable) == ("NOTES_UNWRITABLE", True)
            assert failed.effect == pb.FAILURE_EFFECT_ROLLED_BACK
        assert [name for name, _ in double.orders()] == ["pause_generation"]
        state = (await client.profile()).state
        assert state.weights.state == pb.WEIGHTS_STATE_VALID
        assert not state.released
        (tmp_path / "data" / "engine.new").rmdir()
        await client.completed(client.update("v2", disk=disk))


@pytest.mark.long
async def test_an_adapter_that_another_loads_meanwhile_stays_theirs(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, root):
        let_it = _slow(double, "load_lora")
        adapter = lora_pb2.LoraAdapter(lora_name="a", source_path=str(root / "lora"))
        load = client.control.LoadLora(lora_pb2.LoadLoraRequest(adapter=adapter))
        await until(lambda: double.orders("load_lora"))
        await double.worker.load_lora({"lora_name": "a", "source": {"uri": "file:///theirs"}})
        let_it()
        taken = await refused(load)
        assert (taken.code.name, taken.reason) == ("ALREADY_EXISTS", "LORA_NAME_TAKEN")
        assert double.worker.loras["a"][1] == "file:///theirs"


@pytest.mark.long
async def test_a_sidecar_ends_though_its_worker_is_still_at_it(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, _):
        let_it = _slow(double, "pause_generation")
        await client.failed(client.pause("abort", deadline_ms=1_000))
        double.next("/engine/resume_generation", Hang())
    let_it()


@pytest.mark.long
async def test_a_version_that_nobody_could_be_told_is_none(tmp_path: Path) -> None:
    async with over_worker(tmp_path) as (double, client, _):
        double.worker.version = "v" * (5 << 20)

        async def unknown() -> bool:
            state = (await client.profile()).state
            return state.weights.state == pb.WEIGHTS_STATE_UNKNOWN

        await until(unknown)


def test_a_count_below_nothing_is_nothing() -> None:
    text = b'dynamo_component_inflight_requests{dynamo_endpoint="generate"} -2\n'
    assert metrics_of(Answered(200, text)).in_flight == 0
