"""Sleeping and waking engines that speak `vllm.Control`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.domain.commands import Pause, ReleaseResources, RestoreResources, Resume
from app.domain.errors import (
    ResourcesReleased,
    StalePauseEpoch,
    StaleReleaseEpoch,
    UnsupportedOperation,
)
from app.domain.kinds import (
    Admission,
    ContentPolicy,
    DrainRule,
    FailureEffect,
    OperationKind,
    OperationState,
    PauseMode,
    ResourceKind,
    Verification,
    WeightsState,
)
from app.domain.operation import Operation
from tests.doubles.vllm_control import C
from tests.operations.gateway import until
from tests.operations.vllm import vllm_gateway

pytestmark = pytest.mark.anyio

S = OperationState
W, KV = ResourceKind.WEIGHTS, ResourceKind.KV_CACHE
BOTH = frozenset({W, KV})


def release(
    content: ContentPolicy = ContentPolicy.PRESERVE, drain: DrainRule = DrainRule.ABORT
) -> ReleaseResources:
    return ReleaseResources(resources=(W, KV), content=content, drain=drain)


def restore(*resources: ResourceKind, epoch: int = 1) -> RestoreResources:
    return RestoreResources(resources=resources or (W, KV), release_epoch=epoch)


def reason(operation: Operation) -> str:
    assert operation.error is not None
    return operation.error.reason


async def test_an_engine_sleeps_and_wakes_in_two_steps(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        slept = await gateway.carry_out(release())
        assert (slept.state, slept.verification) == (S.SUCCEEDED, Verification.UNVERIFIED)
        assert slept.result == {
            "changed": True,
            "release_epoch": 1,
            "released": ["kv_cache", "weights"],
            "memory": [],
            "pause_epoch": 1,
        }
        assert [warning.reason for warning in slept.warnings] == ["KV_CONTENT_DROPPED"]
        facts = await gateway.facts()
        assert (facts.admission, facts.released) == (Admission.PAUSED, BOTH)
        assert (facts.release_epoch, facts.pause_epoch) == (1, 1)
        assert facts.weights.state is WeightsState.VALID
        assert [(m.level, m.mode) for m in gateway.engine.named("Sleep")] == [(1, 1)]
        with pytest.raises(ResourcesReleased):
            await gateway.give(Resume(pause_epoch=1))
        with pytest.raises(StaleReleaseEpoch):
            await gateway.give(restore(epoch=4))
        first = await gateway.carry_out(restore(W))
        assert (first.state, first.warnings) == (S.SUCCEEDED, ())
        assert (await gateway.facts()).released == {KV}
        last = await gateway.carry_out(restore(KV))
        assert last.state is S.SUCCEEDED
        assert [warning.reason for warning in last.warnings] == ["ADMISSION_OPENED_BRIEFLY"]
        assert [list(m.tags) for m in gateway.engine.named("WakeUp")] == [["weights"], ["kv_cache"]]
        facts = await gateway.facts()
        assert (facts.admission, facts.released) == (Admission.PAUSED, frozenset())
        assert all(one.control.paused for one in gateway.controls)
        assert (await gateway.carry_out(Resume(pause_epoch=1))).state is S.SUCCEEDED
        assert gateway.engine.generate() == "tokens"


@pytest.mark.long
async def test_one_resource_alone_is_not_released(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        alone = ReleaseResources(
            resources=(KV,), content=ContentPolicy.DISCARD, drain=DrainRule.ABORT
        )
        with pytest.raises(UnsupportedOperation):
            await gateway.give(alone)
        with pytest.raises(UnsupportedOperation):
            await gateway.give(release(drain=DrainRule.REFUSE))


@pytest.mark.long
async def test_without_sleep_mode_there_is_nothing_to_release(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.sleep_mode = False
        await gateway.controls[0].restart()
        can = (await gateway.fleet.discover("e1")).capabilities
        assert OperationKind.RELEASE_RESOURCES not in can.operations


async def test_an_engine_without_weights_is_not_opened(tmp_path: Path) -> None:
    """With its last resource vLLM would serve, on what happens to lie in memory."""
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(release(ContentPolicy.DISCARD))
        assert gateway.engine.named("Sleep")[0].level == 2
        assert (await gateway.facts()).weights.state is WeightsState.MISSING
        assert reason(await gateway.carry_out(restore())) == "WEIGHTS_NOT_VALID"
        assert (await gateway.carry_out(restore(W))).state is S.SUCCEEDED
        assert reason(await gateway.carry_out(restore(KV))) == "WEIGHTS_NOT_VALID"
        assert gateway.engine.paused
        assert len(gateway.engine.named("WakeUp")) == 1


@pytest.mark.long
async def test_a_deeper_sleep_is_not_claimed(tmp_path: Path) -> None:
    """vLLM answers a second sleep with the level asked for, and stays as it is."""
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(release())
        again = await gateway.carry_out(release())
        assert again.result is not None
        assert again.result["changed"] is False
        deeper = await gateway.carry_out(release(ContentPolicy.DISCARD))
        assert reason(deeper) == "RESOURCES_RELEASED"
        assert len(gateway.engine.named("Sleep")) == 1


@pytest.mark.long
async def test_frozen_requests_are_not_put_to_sleep(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(Pause(mode=PauseMode.KEEP))
        refused = await gateway.carry_out(release(drain=DrainRule.WAIT))
        assert reason(refused) == "REQUESTS_FROZEN"
        assert (await gateway.carry_out(release())).state is S.SUCCEEDED


@pytest.mark.long
async def test_a_sleep_that_waits_is_a_drain(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.running = {"r"}
        order = await gateway.give(release(drain=DrainRule.WAIT))
        await until(lambda: gateway.engine.paused)
        assert (await gateway.facts()).admission is Admission.DRAINING
        gateway.engine.finish()
        assert (await gateway.end_of(order)).state is S.SUCCEEDED


@pytest.mark.long
async def test_a_sleep_whose_reply_is_lost_is_taken_as_a_sleep(tmp_path: Path) -> None:
    """It may be only paused: to wake what is awake does no harm, the other way round it does."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.loses.add("Sleep")
        ended = await gateway.carry_out(release())
        assert reason(ended) == "RELEASE_UNCONFIRMED"
        facts = await gateway.facts()
        assert (facts.released, facts.release_epoch) == (BOTH, 1)
        assert (await gateway.carry_out(restore())).state is S.SUCCEEDED
        assert (await gateway.facts()).released == frozenset()


@pytest.mark.long
async def test_what_may_be_awake_is_not_woken_on_weights_that_are_gone(tmp_path: Path) -> None:
    """vLLM opens what is awake already when it is woken once more, whatever its weights are."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.fails["Sleep"] = [(C.INTERNAL, "no memory")]
        lost = await gateway.carry_out(release(ContentPolicy.DISCARD))
        assert lost.state is S.FAILED
        if not (await gateway.facts()).released:
            await gateway.carry_out(Pause(mode=PauseMode.ABORT))
            gateway.engine.fails["Sleep"] = [(C.INTERNAL, "no memory")]
            await gateway.carry_out(release(ContentPolicy.DISCARD))
        facts = await gateway.facts()
        assert (facts.released, facts.weights.state) == (BOTH, WeightsState.MISSING)
        refused = await gateway.carry_out(restore(W, epoch=facts.release_epoch))
        assert reason(refused) == "SLEEP_STATE_UNKNOWN"
        assert "WakeUp" not in gateway.engine.orders
        sure = await gateway.carry_out(release())
        assert sure.result is not None
        assert sure.result["changed"] is True
        epoch = (await gateway.facts()).release_epoch
        assert (await gateway.carry_out(restore(W, epoch=epoch))).state is S.SUCCEEDED
        assert gateway.engine.paused


@pytest.mark.long
async def test_one_of_two_members_restarted_while_they_go_to_sleep(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        gateway.controls[1].control.hangs["Sleep"] = asyncio.Event()
        order = await gateway.give(release())
        await until(lambda: bool(gateway.engine.asleep))
        await until(lambda: bool(gateway.controls[1].control.named("Sleep")))
        gateway.controls[1].control.hangs.clear()
        await gateway.controls[1].restart()
        assert reason(await gateway.end_of(order)) == "ENGINE_RESTARTED"
        facts = await gateway.facts()
        assert (facts.released, facts.admission) == (BOTH, Admission.UNKNOWN)


@pytest.mark.long
async def test_a_wake_up_whose_reply_is_lost_leaves_admission_closed(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(release())
        gateway.engine.loses.add("WakeUp")
        gateway.engine.fails["PauseGeneration"] = [(C.UNAVAILABLE, "reset")]
        ended = await gateway.carry_out(restore())
        assert ended.state is S.SUCCEEDED
        assert gateway.engine.paused
        assert (await gateway.facts()).admission is Admission.PAUSED


@pytest.mark.long
async def test_a_wake_up_of_which_nothing_is_known_leaves_it_asleep(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(release())
        gateway.engine.fails["WakeUp"] = [(C.UNAVAILABLE, "reset")]
        assert reason(await gateway.carry_out(restore())) == "RESTORE_UNCONFIRMED"
        facts = await gateway.facts()
        assert (facts.released, facts.admission) == (BOTH, Admission.PAUSED)
        assert (await gateway.carry_out(restore())).state is S.SUCCEEDED


@pytest.mark.long
async def test_the_gateway_restarted_while_it_wakes_an_engine(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(release())
        answer = gateway.engine.hangs["PauseGeneration"] = asyncio.Event()
        order = await gateway.give(restore())
        await until(lambda: not gateway.engine.paused)
        await gateway.stop()
        gateway.engine.hangs.clear()
        answer.set()
        await gateway.start()
        ended = await gateway.end_of(order)
        assert ended.state is S.SUCCEEDED
        assert gateway.engine.paused
        assert "ADMISSION_OPENED_BRIEFLY" in {warning.reason for warning in ended.warnings}


@pytest.mark.long
async def test_a_member_that_does_not_wake_is_named(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        await gateway.carry_out(release())
        gateway.controls[1].control.fails["WakeUp"] = [(C.INTERNAL, "no memory")]
        ended = await gateway.carry_out(restore())
        assert ended.error is not None
        assert (ended.error.ranks, ended.error.effect) == ((1,), FailureEffect.APPLIED_IN_PART)
        facts = await gateway.facts()
        assert (facts.admission, facts.released) == (Admission.PAUSED, BOTH)
        assert (await gateway.carry_out(restore())).state is S.SUCCEEDED


async def test_who_resumes_a_sleeping_engine_is_seen(tmp_path: Path) -> None:
    """Past the gateway: what it would have refused, vLLM takes."""
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(release())
        gateway.engine.paused = False
        facts = await gateway.facts()
        assert (facts.admission, facts.released) == (Admission.OPEN, BOTH)
        assert not facts.serving
        # Who wakes it pauses it anew, and can lift that; the pause of before is gone.
        woken = await gateway.carry_out(restore())
        assert woken.state is S.SUCCEEDED
        after = await gateway.facts()
        assert after.pause is not None
        assert (after.pause.mode, after.pause.by) == (PauseMode.KEEP, woken.id)
        assert after.pause_epoch == facts.pause_epoch + 1
        with pytest.raises(StalePauseEpoch):
            await gateway.give(Resume(pause_epoch=facts.pause_epoch))
        resumed = await gateway.carry_out(Resume(pause_epoch=after.pause_epoch))
        assert (resumed.state, gateway.engine.generate()) == (S.SUCCEEDED, "tokens")
